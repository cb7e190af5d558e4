"""The reference pages list everything that exists, and nothing else.

Settings, routes, headers, events, metrics and error codes are compared with the code;
docs/commands.md is generated.
"""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from fabric.settings import FabricSettings, parse_settings
from router.app import describe_api
from tests.support.command_page import command_page, commands
from tests.support.documented_names import (
    BY_TENANT,
    PARAMETER,
    PREFIX,
    event_classes,
    metrics,
    routes,
    settings,
)
from tests.support.error_codes import error_codes, sources

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION, HTTP_API, CLI, COMMANDS, ERRORS = (
    (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("configuration", "http-api", "cli", "commands", "errors")
)
ROW = re.compile(r"^\| (`.+?) \| (.+?) \| ", re.MULTILINE)  # the names and the default of a setting
# Defaults in words: the setting is empty, and what stands there is done then.
EMPTY_DEFAULTS = {
    *("none", "the model's", "in `data_dir`", "`node-a`, `node-b`, …", "1 each", "the file's Macs"),
    *("the fabric's own", "an equal part"),
}
CELL = re.compile(r"^\| (`.+?) \|", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")
VERB = re.compile(r"/v1/agents/\{agent\}/(\w+)")
# Between routers and nodes, and between a standby and the active router.
INTERNAL_HEADERS = {"call", "caller", "caller-proof", "cluster", "standby", "term"}
# In the JSON of events, fields have these names.
EVENT_KEYS = {"key": "id", "source": "from", "target": "to"}


def section(text: str, heading: str) -> str:
    """Return the text below a heading of the second or third level, up to the next one."""
    return re.split(
        r"^#{2,3} ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE
    )[0]


def first_cells(text: str) -> list[str]:
    return CELL.findall(text)


def test_every_setting_is_described():
    listed = [name for cell in first_cells(CONFIGURATION) for name in NAME.findall(cell)]
    named = {re.sub(r"^(node|router)\.", "", name) for name in settings()}

    assert sorted(listed) == sorted(named)


def documented_defaults() -> list[tuple[str, str]]:
    """List (setting, default) as the rows of the page have them."""
    full = {re.sub(r"^(node|router)\.", "", name): name for name in settings()}
    found = []
    for names_cell, default_cell in ROW.findall(CONFIGURATION):
        names = NAME.findall(names_cell)
        parts = default_cell.split(", ") if len(names) > 1 else [default_cell]
        values = parts * len(names) if len(parts) == 1 else parts
        found += zip([full[name] for name in names], values, strict=True)
    return found


def with_setting(name: str, **value: object) -> FabricSettings:
    """Return the settings of a file that has one; without a value, of one with its section."""
    *sections, key = name.split(".")
    inner: dict = {key: value["value"]} if value else {}
    for section_name in reversed(sections):
        inner = {section_name: inner}
    return parse_settings(inner)


def default_of(name: str) -> object:
    """Return the default of a setting in the code."""
    section: object = FabricSettings()
    before = ""
    for part in name.split("."):
        section = BY_TENANT[before]() if part == "NAME" else getattr(section, part)
        before = part
    return section


@pytest.mark.parametrize(("name", "default"), documented_defaults())
def test_default_of_setting_is_the_described_one(name, default):
    if default in EMPTY_DEFAULTS:
        value = default_of(name)
        assert value in (None, "", (), {}, 0)
        assert value != 0 or default == "the file's Macs"
        return
    value = yaml.safe_load(default.strip("`").replace(",", ""))
    assert with_setting(name, value=value) == with_setting(name)


@pytest.mark.parametrize(("method", "path"), sorted(routes()))
def test_every_route_is_described(method, path):
    verb = VERB.match(path)
    if verb:
        assert f"| `{verb[1]}" in HTTP_API
    else:
        spelled = re.sub(r"\{\w+\}", "ID", path).replace("/nodes/ID", "/nodes/NODE")
        assert f"`{method} {spelled}`" in HTTP_API


def test_every_status_is_described():
    operations = [each for path in describe_api()["paths"].values() for each in path.values()]
    statuses = {status for operation in operations for status in operation["responses"]}
    listed = {
        s
        for row in re.findall(r"^\| ([45][0-9, ]+) \|", HTTP_API, re.MULTILINE)
        for s in row.split(", ")
    }

    # Success, and 503 in Anthropic's dialect, are described elsewhere.
    assert statuses - {"200", "202", "529"} <= listed
    assert "529" in HTTP_API


def test_every_described_route_exists():
    paths = {(method, PARAMETER.sub("ID", path)) for method, path in routes()}
    # The page and its files, and the verbs, which have a table of their own.
    paths |= {("GET", "/"), ("GET", "/dashboard/…"), ("POST", "/v1/agents/ID/…")}
    cells = "\n".join(first_cells(section(HTTP_API, "Routes")))
    listed = set(re.findall(r"`([A-Z]+) (/\S*)`", cells.replace("NODE", "ID")))

    assert listed - paths == set()


def test_every_described_verb_exists():
    cells = "\n".join(first_cells(section(HTTP_API, "Verbs of an agent")))
    listed = set(re.findall(r"`(\w+)", cells))

    assert listed == {verb[1] for _, path in routes() if (verb := VERB.match(path))}


def test_headers_are_the_described_ones():
    """Texts of the source that are names of our headers, against those in the page."""
    texts = {
        node.value.lower().removeprefix("x-macfabric-")
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"x-macfabric-[a-z-]+", node.value.lower())
    }
    listed = {name.lower() for name in re.findall(r"(?i)x-macfabric-([a-z-]+\b)", HTTP_API)}

    assert listed == texts - INTERNAL_HEADERS


def test_events_are_the_described_ones():
    rows = re.findall(r"^\| (`\w+\.\w+`.*?) \| (.*) \|$", section(HTTP_API, "Events"), re.MULTILINE)
    listed = {name: data for cell, data in rows for name in re.findall(r"`([\w.]+)`", cell)}

    assert listed.keys() == event_classes().keys()
    for name, event in event_classes().items():
        named = {EVENT_KEYS.get(field.name, field.name) for field in fields(event)}
        assert {key for key in named if f"`{key}`" not in listed[name]} == set(), name


def test_metrics_are_the_described_ones():
    cells = first_cells(section(HTTP_API, "Metrics"))
    listed = [PREFIX + name for cell in cells for name in NAME.findall(cell)]

    assert sorted(listed) == sorted(metrics())


def test_error_codes_are_the_described_ones():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([0-9, -]+) \|", ERRORS, re.MULTILINE))
    inside = NAME.findall(section(ERRORS, "Within a fabric").split(":", 1)[1])
    statuses = {code: set(map(int, re.findall(r"\d+", row))) for code, row in rows.items()}

    assert {*rows, *inside} == error_codes().keys()
    assert set(rows).isdisjoint(inside)
    assert statuses == {code: set(map(int, error_codes()[code])) for code in rows}


def test_examples_of_error_codes_have_their_status():
    rows = re.findall(r"^\| ([45][0-9, ]+) \| .*? \| (.*) \|$", HTTP_API, re.MULTILINE)
    examples = [(row, code) for row, codes in rows for code in NAME.findall(codes)]

    assert len(examples) > 20
    assert [
        code for row, code in examples if not error_codes()[code] & set(map(int, row.split(", ")))
    ] == []


def test_page_of_commands_is_up_to_date():
    assert command_page() == COMMANDS, "docs/commands.md is not what `make reference` writes"


def test_every_command_is_in_the_overview():
    names = {name.split()[0] for name in commands()}

    assert len(names) > 20
    assert {name for name in names if not re.search(rf"`{name}[` ]", CLI)} == set()

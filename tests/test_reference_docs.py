"""The reference pages name all there is: settings, routes, headers, commands."""

import argparse
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from fabric.retention import TenantShare
from fabric.settings import FabricSettings
from router.app import described
from router.cli.commands import build_parser

ROOT = Path(__file__).resolve().parents[1]
CONFIGURATION, HTTP_API, CLI = (
    (ROOT / "docs" / name).read_text() for name in ("configuration.md", "http-api.md", "cli.md")
)
CELL = re.compile(r"^\| (`.+?) \|", re.MULTILINE)
NAME = re.compile(r"`([\w.]+)`")
VERB = re.compile(r"/v1/agents/\{agent\}/(\w+)")


def setting_names(section) -> Iterator[str]:
    """List a section's keys; those of a section inside with its name before them."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from (f"{field.name}.{name}" for name in setting_names(value))
        elif field.name == "tenants":
            yield from (f"tenants.NAME.{name}" for name in setting_names(TenantShare()))
        else:
            yield field.name


def routes() -> set[tuple[str, str]]:
    """List (method, path) of every route; test_openapi holds the document to the application."""
    paths = described()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def test_every_setting_is_described():
    listed = [name for cell in CELL.findall(CONFIGURATION) for name in NAME.findall(cell)]
    named = {re.sub(r"^(node|router)\.", "", name) for name in setting_names(FabricSettings())}

    assert sorted(listed) == sorted(named)


@pytest.mark.parametrize(("method", "path"), sorted(routes()))
def test_every_route_is_described(method, path):
    verb = VERB.match(path)
    if verb:
        assert f"| `{verb[1]}" in HTTP_API
    else:
        spelled = re.sub(r"\{\w+\}", "ID", path).replace("/nodes/ID", "/nodes/NODE")
        assert f"`{method} {spelled}`" in HTTP_API


def test_every_status_is_described():
    operations = [each for path in described()["paths"].values() for each in path.values()]
    statuses = {status for operation in operations for status in operation["responses"]}
    listed = {
        s
        for row in re.findall(r"^\| ([45][0-9, ]+) \|", HTTP_API, re.MULTILINE)
        for s in row.split(", ")
    }

    # Success, and 503 in Anthropic's dialect, are described elsewhere.
    assert statuses - {"200", "202", "529"} <= listed
    assert "529" in HTTP_API


def test_every_command_is_described():
    parser = build_parser()
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    commands = set(actions[0].choices)

    assert len(commands) > 20
    assert {name for name in commands if not re.search(rf"`{name}[` ]", CLI)} == set()

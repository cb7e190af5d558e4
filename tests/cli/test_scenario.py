"""`macfabric scenario` on files."""

import json
import re

import pytest

LISTEN = "agents: {a: {}, b: {}, c: {}}"


@pytest.mark.parametrize(
    ("phase", "hear"),
    [
        ("agents: [a, b], visible_to: []", []),
        ("agents: [a, b]", ["a", "b"]),
        ("agents: [a]", []),
        ("agents: [a], visible_to: [b, c]", ["b", "c"]),
        ("agents: [a, b], visible_to: [a, c]", ["a", "c"]),
        ("agents: [a], visible_to: [a]", []),
    ],
)
def test_show_lists_the_listeners_of_each_phase(run, tmp_path, phase, hear):
    file = tmp_path / "listen.yaml"
    file.write_text(f"scenario: listen\n{LISTEN}\nphases:\n  - {{id: one, {phase}}}\n")
    status, printed, _ = run("scenario", "show", str(file), "--json")
    assert status == 0
    assert json.loads(printed)["phases"][0]["hear"] == hear
    _, printed, _ = run("scenario", "show", str(file))
    assert printed.splitlines()[-1].split("  ")[-1].strip() == (", ".join(hear) or "-")


def test_control_characters_of_a_file_are_escaped(run, tmp_path):
    file = tmp_path / "esc.yaml"
    file.write_text(
        'scenario: esc\ntitle: "A\\e[31mB"\nagents: {kim: {}}\n'
        'phases:\n  - {id: told, agents: [kim], title: "\\e]0;owned\\a", "x\\e[31m": 1}\n'
    )
    for verb in ("check", "show", "run"):
        _, printed, errors = run("scenario", verb, str(file))
        assert "\x1b" not in printed + errors
        assert "\x07" not in printed + errors
    assert "\\x1b[31m" in errors


def test_each_error_starts_with_its_position(run, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("scenario: Bad Name\nagents: {a: {}}\nphases: [{id: x, agents: [b]}]\n")
    status, printed, errors = run("scenario", "check", str(file))
    assert (status, printed) == (1, "")
    lines = errors.splitlines()
    assert len(lines) == 2
    assert all(re.match(r"bad\.yaml:\d+:\d+: ", line) for line in lines)


def test_variables_and_repeats_are_part_of_the_request(run, fabric):
    """A scenario that the fabric refuses ends the command."""
    options = ("--set", "topic=lanterns", "--set", "tone=a=b", "--repeat", "3")
    status, _, err = run("scenario", "run", "debate", *options, "--url", fabric.url)
    [(method, path, body)] = fabric.requests
    assert (status, method, path) == (1, "POST", "/v1/scenarios"), err
    assert body["set"] == {"topic": "lanterns", "tone": "a=b"}
    assert (body["scenario"], body["repeat"]) == ("debate", 3)
    assert run("scenario", "run", "debate", "--set", "topic", "--url", fabric.url)[0] == 2
    assert run("scenario", "run", "debate", "--repeat", "0", "--url", fabric.url)[0] == 2

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
def test_show_lists_who_hears_another_agent(run, tmp_path, phase, hear):
    file = tmp_path / "listen.yaml"
    file.write_text(f"scenario: listen\n{LISTEN}\nphases:\n  - {{id: one, {phase}}}\n")
    status, printed, _ = run("scenario", "show", str(file), "--json")
    assert status == 0
    assert json.loads(printed)["phases"][0]["hear"] == hear
    _, printed, _ = run("scenario", "show", str(file))
    assert printed.splitlines()[-1].split("  ")[-1].strip() == (", ".join(hear) or "-")


def test_nothing_in_a_file_reaches_the_terminal_raw(run, tmp_path):
    file = tmp_path / "esc.yaml"
    file.write_text(
        'scenario: esc\ntitle: "A\\e[31mB"\nagents: {kim: {}}\n'
        'phases:\n  - {id: told, agents: [kim], title: "\\e]0;owned\\a", "x\\e[31m": 1}\n'
    )
    for verb in ("check", "show", "run"):
        _, printed, told = run("scenario", verb, str(file))
        assert "\x1b" not in printed + told
        assert "\x07" not in printed + told
    assert "\\x1b[31m" in told


def test_each_fault_begins_with_its_place(run, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text("scenario: Bad Name\nagents: {a: {}}\nphases: [{id: x, agents: [b]}]\n")
    status, printed, told = run("scenario", "check", str(file))
    assert (status, printed) == (1, "")
    lines = told.splitlines()
    assert len(lines) == 2
    assert all(re.match(r"bad\.yaml:\d+:\d+: ", line) for line in lines)

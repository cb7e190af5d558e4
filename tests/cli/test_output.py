"""Figures for people have units; programs get plain numbers."""

import json

import pytest

from router.cli.output import human_seconds, human_value
from tests.cli.fake_fabric import AGENT, ANSWERS

DURATIONS = {
    0.0606276: "61 ms",
    0: "0 ms",
    3.24: "3.2 s",
    59.99: "60.0 s",
    60: "1 min 0 s",
    3_725: "1 h 2 min",
    200_000: "2 d 7 h",
}
VALUES = [
    ("pinned", True, "yes"),
    ("exact_tokens", None, "-"),
    ("tokens", 2048, "2,048"),
    ("epoch", 16_777_221, "16777221"),
    ("bytes", {"hot": 1 << 20, "disk": 512}, "hot 1.0 MiB, disk 512 B"),
    ("bytes_sent", 2048, "2.0 KiB"),
    ("bytes_per_s", 2048, "2.0 KiB/s"),
    ("pause_seconds", 0.0388787, "39 ms"),
    ("decays_after_s", 90.0, "1 min 30 s"),
    ("prefill_tokens_per_s", 260.123, "260"),
    ("tiers", ["hot", "disk"], "hot, disk"),
    ("copies", [], "-"),
    ("share", 0.123456, "0.123"),
]


@pytest.mark.parametrize("seconds", DURATIONS)
def test_durations_have_readable_units(seconds):
    assert human_seconds(seconds) == DURATIONS[seconds]


@pytest.mark.parametrize("value", [None, "soon", float("nan"), float("inf")])
def test_invalid_duration_is_a_dash(value):
    assert human_seconds(value) == "-"


@pytest.mark.parametrize(("name", "value", "shown"), VALUES)
def test_values_are_formatted_by_their_names(name, value, shown):
    assert human_value(name, value) == shown


def test_timestamps_are_printed_as_local_dates(run, fabric, monkeypatch):
    born = {**AGENT, "created_s": 1795649693.1483097}
    monkeypatch.setitem(ANSWERS, ("GET", "/v1/agents/mira"), born)
    text = run("agent", "mira", "--url", fabric.url)[1]
    printed = json.loads(run("agent", "mira", "--url", fabric.url, "--json")[1])

    (line,) = [line for line in text.splitlines() if line.startswith("created")]
    assert "2026-11-2" in line
    assert "1795649693" not in text
    assert printed["created_s"] == born["created_s"]

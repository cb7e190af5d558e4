"""Figures that documents quote are those of committed results.

A quoted figure is followed by a comment that names the result and the way to its value:
`104x<!-- ttft: ratios / cold by disk at 8192 tokens -->`.
"""

import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_docs import documents

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
QUOTED = re.compile(
    r"(?P<text>\S+(?: (?:ms|s|%|MB|GB))?)<!-- (?P<name>[\w/-]+): (?P<path>[^>]+?) -->"
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.(?P<decimals>\d+))?")
SCALES = {"%": 100.0, "ms": 1_000.0, "x": 1.0, "s": 1.0, "MB": 1e-6, "GB": 1e-9, "": 1.0}


@cache
def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def value_at(record, path):
    found = record
    for key in path.split(" / "):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return float(found)


def problem(quoted, record):
    """Return what is wrong with a quoted figure, or None."""
    text, path = quoted["text"].lstrip("(*|"), quoted["path"]
    number = NUMBER.search(text)
    if number is None:
        return f"{text!r} has no number"
    unit = text[number.end() :].strip(" *|,.;)")
    if unit not in SCALES:
        return f"{text!r} has a unit without a scale"
    try:
        measured = value_at(record, path) * SCALES[unit]
    except (KeyError, IndexError, ValueError):
        return f"{path!r} is not in the result"
    shown = float(number.group().replace(",", ""))
    step = 10.0 ** -len(number["decimals"] or "")
    if math.isclose(shown, measured, abs_tol=0.5 * step * (1 + 1e-9), rel_tol=0.0):
        return None
    return f"{text!r} is quoted, {measured:.6g} was measured"


def test_quoted_figures_are_those_of_committed_results():
    problems = [
        f"{document.path}: {quoted.group()}: {wrong}"
        for document in documents()
        for quoted in QUOTED.finditer(document.text)
        if (wrong := problem(quoted, result(quoted["name"]))) is not None
    ]
    assert problems == []


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("104x<!-- a: ratios / r -->", True),
        ("**104x**<!-- a: ratios / r -->", True),
        ("105x<!-- a: ratios / r -->", False),
        ("104.2x<!-- a: ratios / r -->", False),
        ("12.5 %<!-- a: figures / t / 0 -->", True),
        ("125 ms<!-- a: figures / t / 0 -->", True),
        ("0.13 s<!-- a: figures / t / 0 -->", True),
        ("0.12 s<!-- a: figures / t / 0 -->", True),
        ("0.2 s<!-- a: figures / t / 1 -->", False),
        ("many<!-- a: ratios / r -->", False),
        ("104 parsecs<!-- a: ratios / r -->", False),
    ],
)
def test_rule_finds_wrong_quotes(text, is_right):
    record = {"ratios": {"r": 103.9}, "figures": {"t": [0.125]}}
    quoted = QUOTED.search(f"It is {text} there.")

    assert (problem(quoted, record) is None) == is_right

"""The README's table: figures of `macfabric demo`, as a result.

Four agents of 2,000 tokens on three nodes of this machine, in each state of their caches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.report import Limit, Report, say
from router.cli.demo.demo_table import STATES

DESCRIPTION = "the demo's agents in each state: seconds to the first token, tokens recomputed"

REPEATS = 3
DEMO_S = 900.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--repeats", type=int, help=f"of the demo (default: {REPEATS})")


def run(arguments: argparse.Namespace) -> Report:
    """Run the demo, and collect the turns of all its runs."""
    repeats = arguments.repeats or (1 if arguments.quick else REPEATS)
    documents = []
    for number in range(repeats):
        say(f"demo {number + 1} of {repeats}")
        documents.append(_demo())
    turns = [turn for document in documents for turn in document["turns"]]
    table = {state: _row([turn for turn in turns if turn["state"] == state]) for state in STATES}
    wrong = sum(not turn["right"] or bool(turn["problem"]) for turn in turns)
    failed = sum(len(document["pulse"]["failures"]) for document in documents)
    ratios = {
        f"cold by {state}": table["cold"]["median"] / table[state]["median"] for state in STATES[1:]
    }
    limits = (
        Limit("wrong answers", wrong, 0, is_least=False),
        Limit("failed requests of the endpoint's watcher", failed, 0, is_least=False),
    )
    return Report(
        {"agents": len({turn["agent"] for turn in turns}), "repeats": repeats},
        {"seconds to the first token": table},
        ratios,
        limits,
    )


def _demo() -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "router.cli.main", "demo", "--json"],
        capture_output=True,
        text=True,
        timeout=DEMO_S,
        check=False,
        env=os.environ,
    )
    if ran.returncode:
        untrue = json.loads(ran.stdout)["untrue"] if ran.stdout else []
        message = f"the demo failed: {'; '.join(untrue) or ran.stderr[-500:]}"
        raise RuntimeError(message)
    return dict(json.loads(ran.stdout))


def _row(turns: list[dict[str, Any]]) -> dict[str, float]:
    times_s = [turn["first_token_ms"] / 1000 for turn in turns]
    computed = [turn["prompt_tokens"] - turn["cached_tokens"] for turn in turns]
    return {
        "least": min(times_s),
        "median": statistics.median(times_s),
        "most": max(times_s),
        "tokens recomputed": statistics.median(computed),
    }

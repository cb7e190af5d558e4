"""Time to first token of a long prompt whose head another node has cached, over several links.

Two real nodes run in this process, at speeds set by `benchmarks/paced_engine.py`, over a loopback
that the kernel limits to the stated rate (`benchmarks/shaped_loopback.py`). An agent's turn
computes the head on one node; then another agent on the other node begins with the same head.

    bound       1.3 x (30 ms + bytes / (0.8 x rate)) + the rest of the prompt + one step
    too slow    a link over which the bytes take longer than computing: no head may be fetched
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chat_client import ChatAnswer, Message
from benchmarks.large_model import write_model
from benchmarks.local_fabric import LocalFabric, local_fabric
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.namespaces import missing_requirement
from benchmarks.paced_engine import Pace, Paces, paced_nodes
from benchmarks.prompts import own_words, user
from benchmarks.report import Limit, Report, environment, say
from benchmarks.shaped_loopback import own_loopback, shape_ports
from benchmarks.workload import Geometry
from router.placement.choice import Policy

DESCRIPTION = "a beginning that another node has: the first token, over links of stated rates"

MODEL = Geometry(128, 256, 2, 2, 2, 64, 4_096)
PREFILL_TOKENS_PER_S, DECODE_STEPS_PER_S = 400.0, 30.0
HEAD_TOKENS, QUICK_HEAD_TOKENS = 3_072, 1_024
TAIL_TOKENS = 64
LINKS_MBIT, QUICK_LINKS_MBIT = (2.0, 4.0, 8.0, 16.0), (8.0,)
SLOW_MBIT, SLOW_PREFILL_TOKENS_PER_S = 0.75, 600.0  # transferring takes longer than computing
REPEATS, QUICK_REPEATS = 3, 1
NODES = ("lender", "borrower")
MEASURED_S = 180.0
BOUND_FACTOR, START_S, LINK_SHARE = 1.3, 0.03, 0.8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--repeats", type=int, help=f"default: {REPEATS}")
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure over each link."""
    reason = missing_requirement()
    if reason is not None:
        print(f"bench shipped-head needs a loopback of its own: {reason}", file=sys.stderr)
        raise SystemExit(2)
    quick = arguments.quick
    parameters = {
        "prefill [tokens/s]": PREFILL_TOKENS_PER_S,
        "prefill beside the slowest link [tokens/s]": SLOW_PREFILL_TOKENS_PER_S,
        "decode [steps/s]": DECODE_STEPS_PER_S,
        "beginning [tokens]": QUICK_HEAD_TOKENS if quick else HEAD_TOKENS,
        "repeats": arguments.repeats or (QUICK_REPEATS if quick else REPEATS),
    }
    links = (*(QUICK_LINKS_MBIT if quick else LINKS_MBIT), SLOW_MBIT)
    cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
    with tempfile.TemporaryDirectory() as folder, own_loopback(), cells.until_interrupted():
        model = write_model(Path(folder) / "model", MODEL)
        for mbit in links:
            if f"{mbit:g}" not in cells:
                say(f"a link of {mbit:g} Mbit/s")
                cells.add(f"{mbit:g}", _measure(model, mbit, parameters))
    cells.finish()
    return _report(cells, parameters, links)


def _measure(model: Path, mbit: float, parameters: dict[str, Any]) -> Figures:
    """Return the samples of all repeats over a link of this rate."""
    speed = SLOW_PREFILL_TOKENS_PER_S if mbit == SLOW_MBIT else PREFILL_TOKENS_PER_S
    paces = Paces([Pace(speed, DECODE_STEPS_PER_S) for _ in NODES])
    figures: Figures = {}

    def shape(fabric: LocalFabric) -> None:
        resources = (fabric.node(name).node.resources for name in NODES)
        shape_ports([a.port for each in resources for a in each.transfers.addresses()], mbit)

    with (
        paced_nodes(paces),
        local_fabric(
            str(model), nodes=NODES, policy=Policy.ROUND_ROBIN, before_router=shape
        ) as fabric,
    ):
        measured = _await_rate(fabric)
        for repeat in range(parameters["repeats"]):
            pair = _pair(fabric, model, parameters["beginning [tokens]"], f"{mbit}-{repeat}")
            for name, value in pair.samples(mbit).items():
                figures.setdefault(name, []).append(value)
    return {**figures, "measured rate": [measured], "late steps": [paces.late_share]}


def _await_rate(fabric: LocalFabric) -> float:
    """Wait until the borrower has measured its link; return the rate [bytes/s]."""
    deadline_s = time.monotonic() + MEASURED_S
    while time.monotonic() < deadline_s:
        tables = (fabric.node(name).node.links for name in NODES)
        rates = [link.bytes_per_s for each in tables for link in each.views() if link.bytes_per_s]
        if len(rates) == len(NODES):
            return min(rates)
        time.sleep(0.2)
    message = "the nodes did not measure their link"
    raise TimeoutError(message)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two agents with one head, on two nodes, and the bytes sent between them."""

    first: ChatAnswer
    second: ChatAnswer
    moved_bytes: int

    def samples(self, mbit: float) -> dict[str, float]:
        """Return the figures by name."""
        second, rate = self.second, 1e6 * mbit / 8
        rest_s = (second.prompt_tokens - second.cached_tokens) / PREFILL_TOKENS_PER_S
        travel_s = START_S + self.moved_bytes / (LINK_SHARE * rate)
        return {
            "computed [s]": self.first.ttft_s,
            "first token [s]": second.ttft_s,
            "bound [s]": BOUND_FACTOR * travel_s + rest_s + 1 / DECODE_STEPS_PER_S,
            "bytes": float(self.moved_bytes),
            "fetched tokens": float(second.cached_tokens),
        }


def _pair(fabric: LocalFabric, model: Path, tokens: int, name: str) -> _Pair:
    client = fabric.client()
    system: Message = {"role": "system", "content": own_words(model, tokens, name)}
    answers = []
    before = _sent_bytes(fabric)
    for number in range(len(NODES)):
        messages = [system, user(own_words(model, TAIL_TOKENS, f"{name}-{number}"))]
        answers.append(client.chat(messages, 2, agent=f"agent-{name}-{number}"))
    first, second = answers
    if first.headers["x-macfabric-node"] == second.headers["x-macfabric-node"]:
        message = "both agents began on one node"
        raise RuntimeError(message)
    return _Pair(first, second, _sent_bytes(fabric) - before)


def _sent_bytes(fabric: LocalFabric) -> int:
    nodes = (fabric.node(name).node for name in NODES)
    return sum(int(node.resources.transfers.counts().get("bytes", 0)) for node in nodes)


def _report(cells: MeasuredCells, parameters: dict[str, Any], links: Sequence[float]) -> Report:
    rows: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    limits = []
    for mbit in links:
        cell = cells.get(f"{mbit:g}")
        if cell is None:
            continue
        name = f"{mbit:g} Mbit/s"
        row = rows[name] = {key: statistics.median(values) for key, values in cell.items()}
        ratios[f"{name}: computed by shipped"] = row["computed [s]"] / row["first token [s]"]
        if mbit == SLOW_MBIT:
            statement = "tokens fetched over a link that takes longer than computing"
            limits.append(Limit(statement, max(cell["fetched tokens"]), 0.0, is_least=False))
            continue
        pairs = zip(cell["first token [s]"], cell["bound [s]"], strict=True)
        share = statistics.median(first / bound for first, bound in pairs)
        limits.append(Limit(f"{name}: first token by its bound", share, 1.0, is_least=False))
        statement = f"{name}: least tokens of the beginning fetched"
        least = parameters["beginning [tokens]"] * 3 // 4
        limits.append(Limit(statement, min(cell["fetched tokens"]), least, is_least=True))
    notes = ["medians of the repeats; each limit on time is on the median of pairs"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    return Report(parameters, {"link": rows}, ratios, tuple(limits), tuple(notes))

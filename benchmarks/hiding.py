"""Five agents take turns on a node with memory for two: the hidden share of the reloads.

A real node behind a real router, in this process. In one arm the agents take turns in a fixed
order, which the router learns: it loads the next agent while the current one decodes. In the other
arm the order is random, so that nothing can be expected, and each turn reads its agent from disk.
Hidden is the time for which the node reads blocks while no client waits for a first token.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.chat_client import Message
from benchmarks.local_fabric import LocalFabric, local_fabric
from benchmarks.report import Limit, Report, say
from node.limits import ROOM_TOKENS

DESCRIPTION = "five agents in turn with memory for two: reload time hidden behind decode"

AGENTS = 5
TOKENS, QUICK_TOKENS = 3_000, 600
LAPS, QUICK_LAPS = 8, 4
LEARNT_LAPS = 3  # before the order is learnt
ANSWER_TOKENS = 48
IN_MEMORY = 2  # agents, with what their turns add and the room for their next answers
HIDDEN_MIN = 0.8
WORDS = 0.75  # of a token
NODE = "node-a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--tokens", type=int, help=f"of each agent (default: {TOKENS})")
    parser.add_argument("--model", default="recall", help="a bundled model or a folder")
    parser.add_argument("--seed", type=int, default=0, help="of the random order (default: 0)")


@dataclass(frozen=True, slots=True)
class Turn:
    """Time to first token of one turn, and the place of its cache."""

    began_s: float
    first_s: float  # since then
    was_hot: bool


class _Agents:
    """Agents of one node, and their conversations."""

    def __init__(self, fabric: LocalFabric) -> None:
        self._client = fabric.client()
        self._messages: dict[str, list[Message]] = {}
        self.reads: list[tuple[float, float]] = []  # start and end of each block's read
        self._watch_reads(fabric)

    def _watch_reads(self, fabric: LocalFabric) -> None:
        """Record when the node reads blocks."""
        blocks = fabric.node(NODE).node.resources.store.blocks
        load = blocks.load_into

        def watched(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return load(*arguments, **options)
            finally:
                self.reads.append((began_s, time.perf_counter()))

        blocks.load_into = watched  # type: ignore[method-assign]

    def ask(self, agent: str, text: str) -> Turn:
        """Ask an agent, and add its answer to the conversation."""
        messages = self._messages.setdefault(agent, [])
        messages.append({"role": "user", "content": text})
        answer = self._client.chat(messages, ANSWER_TOKENS, agent=agent)
        messages.append(answer.message())
        was_hot = answer.headers["x-macfabric-cache"] == "hot"
        return Turn(answer.began_s, answer.ttft_s, was_hot)


def _orders(laps: int, rng: random.Random, *, is_fixed: bool) -> list[list[int]]:
    """Return the order of the agents in each lap; never one that follows itself."""
    orders: list[list[int]] = []
    for _ in range(laps):
        lap = list(range(AGENTS))
        while not is_fixed:
            rng.shuffle(lap)
            if not orders or lap[0] != orders[-1][-1]:
                break
        orders.append(lap)
    return orders


def _laps(agents: _Agents, arm: str, orders: Sequence[Sequence[int]]) -> list[Turn]:
    """Let agents take turns; return the turns after the laps in which an order is learnt."""
    turns: list[Turn] = []
    for number, lap in enumerate(orders):
        for agent in lap:
            turn = agents.ask(f"{arm}-{agent}", f"Lap {number}: go on.")
            if number >= LEARNT_LAPS:
                turns.append(turn)
    return turns


def run(arguments: argparse.Namespace) -> Report:
    """Compare the arms."""
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    laps = QUICK_LAPS if arguments.quick else LAPS
    rng = random.Random(arguments.seed)
    arms: dict[str, list[Turn]] = {}
    with local_fabric(arguments.model) as fabric:
        agents = _Agents(fabric)
        for arm in ("fixed", "random"):
            say(f"{AGENTS} agents of {tokens} tokens, {arm} order")
            for agent in range(AGENTS):
                words = [f"word{rng.randrange(1000)}" for _ in range(int(WORDS * tokens / 2))]
                agents.ask(f"{arm}-{agent}", " ".join(words))
            view = fabric.agent(NODE, f"{arm}-0").view()
            room_tokens = view.tokens + laps * 2 * ANSWER_TOKENS + ROOM_TOKENS
            spec = fabric.node(NODE).node.resources.store.spec
            fabric.hold(NODE, IN_MEMORY * spec.resident_bytes(room_tokens))
            fabric.drop(NODE)
            arms[arm] = _laps(agents, arm, _orders(laps, rng, is_fixed=arm == "fixed"))
        reads = list(agents.reads)
    return _report(arguments.model, view.tokens, arms, reads)


def _reading_s(turns: Sequence[Turn], reads: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the seconds of reading in an arm, and those while a client waited for a token."""
    first, last = turns[0].began_s, turns[-1].began_s + turns[-1].first_s
    total_s = waited_s = 0.0
    for begin, end in reads:
        if first <= begin <= last:
            total_s += end - begin
            waits = ((t.began_s, t.began_s + t.first_s) for t in turns)
            waited_s += sum(max(0.0, min(end, until) - max(begin, since)) for since, until in waits)
    return total_s, waited_s


def _report(
    model: str,
    tokens: int,
    arms: dict[str, list[Turn]],
    reads: Sequence[tuple[float, float]],
) -> Report:
    first_s = {arm: statistics.median(t.first_s for t in turns) for arm, turns in arms.items()}
    reading_s = {arm: _reading_s(turns, reads) for arm, turns in arms.items()}
    hidden = {arm: 1 - waited / total for arm, (total, waited) in reading_s.items() if total}
    hot = {arm: sum(t.was_hot for t in turns) / len(turns) for arm, turns in arms.items()}
    table = {
        arm: {
            "first token [ms], median": 1000 * first_s[arm],
            "in memory when asked": hot[arm],
            "reading [ms]": 1000 * reading_s[arm][0],
            "of it, awaited [ms]": 1000 * reading_s[arm][1],
        }
        for arm in arms
    }
    limits = (
        Limit(
            "share of the reload time hidden", hidden.get("fixed", 0.0), HIDDEN_MIN, is_least=True
        ),
        Limit("turns whose agent was loaded before", hot["fixed"], HIDDEN_MIN, is_least=True),
    )
    parameters = {
        "model": model,
        "agents": AGENTS,
        "in memory": IN_MEMORY,
        "tokens": tokens,
        "turns": len(arms["fixed"]),
    }
    return Report(parameters, {"orders": table}, hidden, limits)

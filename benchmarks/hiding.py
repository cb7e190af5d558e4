"""Five agents take turns on a node with memory for two: how much of the reloads is hidden.

A real node behind a real router, in this process. In one arm the agents take turns in a fixed
order, which the router learns: it loads the next agent while the current one decodes. In the other
arm the order is random, so that nothing can be expected, and each turn reads its agent from disk.
Hidden is what the node spends on reading blocks while no client waits for a first token.
"""

import argparse
import asyncio
import json
import random
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Limit, Report, open_directly, say
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId, NodeName, TenantId
from fabric.settings import NodeSettings, RouterSettings
from node.limits import ROOM_TOKENS
from node.service import NodeConfig, NodeService
from router.fleet.node_client import ControlTransport
from router.serve import serve_roster

DESCRIPTION = "five agents in turn with memory for two: reload time hidden behind decode"

AGENTS = 5
TOKENS, QUICK_TOKENS = 3_000, 600
LAPS, QUICK_LAPS = 8, 4
LEARNT_LAPS = 3  # before the order is known
ANSWER_TOKENS = 48
IN_MEMORY = 2  # agents, with what their turns add and the room for their next answers
HIDDEN_MIN = 0.8
WORDS = 0.75  # of a token
NODE, KEY = NodeName("hiding"), bytes(range(32))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--tokens", type=int, help=f"of each agent (default: {TOKENS})")
    parser.add_argument("--model", default="recall", help="a bundled model or a folder")
    parser.add_argument("--seed", type=int, default=0, help="of the random order (default: 0)")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took until its first token, and where its memory was."""

    began_s: float
    first_s: float  # since then
    was_hot: bool


class Fabric:
    """A node, its router, and the conversations of all agents."""

    def __init__(self, folder: Path, model: str) -> None:
        settings = NodeSettings(durability="none")
        self.node = NodeService(
            NodeConfig(NODE, folder / "node", model, KEY, settings, "127.0.0.1", 1)
        )
        self.url = ""
        self.reads: list[tuple[float, float]] = []  # begin and end of each block's read
        self._model = model
        self._said: dict[str, list[dict[str, str]]] = {}

    def start(self) -> None:
        """Start the node, then the router."""
        self.node.start()
        self._watch_reads()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        is_ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        work = serve_roster(
            RouterSettings(), KEY, self._roster, [listener], on_ready=lambda *_: is_ready.set()
        )
        self._serving = self._loop.create_task(work)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        is_ready.wait()

    def _watch_reads(self) -> None:
        """Note when the node reads blocks."""
        blocks = self.node.node.resources.store.blocks
        load = blocks.load_into

        def watched(*arguments: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return load(*arguments, **options)
            finally:
                self.reads.append((began_s, time.perf_counter()))

        blocks.load_into = watched  # type: ignore[method-assign]

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._serving)
        except asyncio.CancelledError:
            self._loop.close()

    def stop(self) -> None:
        """Stop the router, then the node."""
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()
        self.node.stop()

    async def _roster(self) -> dict[NodeName, ControlTransport]:
        async def send(raw: bytes) -> bytes:
            return await asyncio.wrap_future(self.node.control(raw))

        return {NODE: send}

    def hold(self, agents: int, tokens: int) -> None:
        """Let the node's memory hold caches of so many agents."""
        size_bytes = self.node.node.resources.store.spec.resident_bytes(tokens)
        self.node.node.resources.engine.budget.resize(agents * size_bytes)

    def drop(self) -> None:
        """Drop all caches from memory."""
        hot = self.node.node.tiers.hot
        self.node._on_loop(_called(lambda: hot.drop_resident(0))).result()  # noqa: SLF001

    def view(self, agent: str) -> AgentView:
        """Return the node's view of an agent."""
        found = self.node.node.resources.table.require((TenantId("default"), AgentId(agent)))
        return found.view()

    def ask(self, agent: str, text: str) -> Turn:
        """Ask an agent, and add its answer to the conversation."""
        said = self._said.setdefault(agent, [])
        said.append({"role": "user", "content": text})
        body = {
            "model": self._model,
            "messages": said,
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        headers = {"content-type": "application/json", "x-agent-id": agent}
        url = f"{self.url}/v1/chat/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
        began_s, first_s, parts = time.perf_counter(), 0.0, []
        with open_directly(request, 600.0) as answer:
            was_hot = answer.headers["x-macfabric-cache"] == "hot"
            for line in answer:
                choices = json.loads(line[6:]).get("choices") if line.startswith(b"data: {") else []
                part = choices[0]["delta"].get("content") if choices else None
                if part:
                    first_s = first_s or time.perf_counter() - began_s
                    parts.append(part)
        said.append({"role": "assistant", "content": "".join(parts)})
        return Turn(began_s, first_s, was_hot)


async def _called(work: object) -> None:
    assert callable(work)
    work()


@contextmanager
def _fabric(model: str) -> Iterator[Fabric]:
    with tempfile.TemporaryDirectory() as folder:
        made = Fabric(Path(folder), model)
        made.start()
        try:
            yield made
        finally:
            made.stop()


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


def _laps(fabric: Fabric, arm: str, orders: Sequence[Sequence[int]]) -> list[Turn]:
    """Let agents take turns; return those after the laps in which an order is learnt."""
    turns: list[Turn] = []
    for number, lap in enumerate(orders):
        for agent in lap:
            turn = fabric.ask(f"{arm}-{agent}", f"Lap {number}: go on.")
            if number >= LEARNT_LAPS:
                turns.append(turn)
    return turns


def run(arguments: argparse.Namespace) -> Report:
    """Compare the arms."""
    tokens = arguments.tokens or (QUICK_TOKENS if arguments.quick else TOKENS)
    laps = QUICK_LAPS if arguments.quick else LAPS
    rng = random.Random(arguments.seed)
    arms: dict[str, list[Turn]] = {}
    with _fabric(arguments.model) as fabric:
        for arm in ("fixed", "random"):
            say(f"{AGENTS} agents of {tokens} tokens, {arm} order")
            for agent in range(AGENTS):
                words = [f"word{rng.randrange(1000)}" for _ in range(int(WORDS * tokens / 2))]
                fabric.ask(f"{arm}-{agent}", " ".join(words))
            view = fabric.view(f"{arm}-0")
            fabric.hold(IN_MEMORY, view.tokens + laps * 2 * ANSWER_TOKENS + ROOM_TOKENS)
            fabric.drop()
            arms[arm] = _laps(fabric, arm, _orders(laps, rng, is_fixed=arm == "fixed"))
        reads = list(fabric.reads)
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

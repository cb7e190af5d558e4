"""Time to first token by context, place of the cache, and number of simultaneous agents.

    cold    nothing is cached: the prompt is computed
    hot     the agent's cache is in memory
    disk    its cache was evicted from memory
    peer    another node owns it: the time includes the move

Real nodes and a real router as `macfabric up` starts them, accessed over HTTP. Each turn after the
first adds a message to the conversation, as clients do.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.chat_client import ChatAnswer, ChatClient, Message
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.prompts import add_model_argument, model_folder, text_of, user
from benchmarks.report import Chart, Limit, Report, environment, say
from benchmarks.servers import UNDISTURBED, running_fabric

DESCRIPTION = "time to the first token: context x cold, hot, disk, peer x agents at once"

CONTEXTS, QUICK_CONTEXTS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768), (512, 1_024)
BATCHES, QUICK_BATCHES = (1, 2, 4, 8), (1, 2)
ROUNDS, QUICK_ROUNDS = 5, 1
BATCH_TOKENS_MAX = 32_768  # of all agents of a cell, as a cold batch of long contexts takes hours
COLD_SECONDS_MAX = 600.0  # after this time a cell measures no more cold rounds
ANSWER_TOKENS = 8
STATES = ("cold", "hot", "disk", "peer")
DISK_RATIOS = {8_192: 100.0, 32_768: 300.0}  # least cold/disk at a context
NODES = ("node-a", "node-b")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    add_model_argument(parser)
    parser.add_argument("--contexts", type=_numbers, help="tokens, separated by commas")
    parser.add_argument("--batches", type=_numbers, help="agents at once, separated by commas")
    parser.add_argument("--rounds", type=int, help=f"of each cell (default: {ROUNDS})")
    parser.add_argument(
        "--batch-tokens", type=int, default=BATCH_TOKENS_MAX, help="most tokens of all at once"
    )
    add_keep_argument(parser)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def run(arguments: argparse.Namespace) -> Report:
    """Measure every cell."""
    quick = arguments.quick
    contexts = arguments.contexts or (QUICK_CONTEXTS if quick else CONTEXTS)
    batches = arguments.batches or (QUICK_BATCHES if quick else BATCHES)
    rounds = arguments.rounds or (QUICK_ROUNDS if quick else ROUNDS)
    with model_folder(arguments) as model:
        parameters = {
            "model": model.name,
            "rounds": rounds,
            "answer tokens": ANSWER_TOKENS,
            "most tokens at once": arguments.batch_tokens,
        }
        cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
        plan = [(c, b) for c in contexts for b in batches if c * b <= arguments.batch_tokens]
        with (
            running_fabric(str(model), nodes=2, settings=UNDISTURBED) as url,
            cells.until_interrupted(),
        ):
            fabric = _Fabric(ChatClient(url, model.name), model, rounds)
            for context, batch in plan:
                fabric.measure(cells, context, batch)
    report = _report(cells, parameters, contexts, batches)
    cells.finish()
    return report


class _Fabric:
    """Agents of a fabric of two nodes, and their conversations."""

    def __init__(self, client: ChatClient, model: Path, rounds: int) -> None:
        self._client = client
        self._model = model
        self._rounds = rounds
        self._talks: dict[str, list[Message]] = {}
        self._at: dict[str, str] = {}  # the node that owns an agent

    def measure(self, cells: MeasuredCells, context: int, batch: int) -> None:
        """Measure the four states of `batch` agents with `context` tokens each."""
        name = _cell(context, batch)
        if name in cells:
            return
        say(f"{context} tokens, {batch} at once: cold")
        cold = self._cold(context, batch)
        agents = [f"{name}-0-{number}" for number in range(batch)]
        figures: Figures = {"cold": cold}
        before: dict[str, Callable[[str], float]] = {
            "hot": lambda _: 0.0,
            "disk": self._evict,
            "peer": self._move,
        }
        for state, prepare in before.items():
            say(f"{context} tokens, {batch} at once: {state}")
            for streams, suffix in ((True, ""), (False, ", whole answer")):
                figures[state + suffix] = self._warm(agents, state, prepare, streams=streams)
        cells.add(name, figures)
        for agent in list(self._talks):
            self._client.call(f"/v1/agents/{agent}/close", {})
        self._talks.clear()

    def _cold(self, context: int, batch: int) -> list[float]:
        ttfts_s: list[float] = []
        for number in range(self._rounds):
            agents = [f"{_cell(context, batch)}-{number}-{each}" for each in range(batch)]
            for agent in agents:
                self._talks[agent] = [user(text_of(self._model, context, agent))]
            ttfts_s += self._together(agents, "cold", lambda _: 0.0, streams=True)
            if sum(ttfts_s) / batch > COLD_SECONDS_MAX:
                break
        return ttfts_s

    def _warm(
        self, agents: list[str], state: str, prepare: Callable[[str], float], *, streams: bool
    ) -> list[float]:
        taken_s: list[float] = []
        for number in range(self._rounds):
            for agent in agents:
                self._talks[agent].append(user(f"Number {number}, {state}: what next?"))
            taken_s += self._together(agents, state, prepare, streams=streams)
        return taken_s

    def _together(
        self, agents: list[str], state: str, prepare: Callable[[str], float], *, streams: bool
    ) -> list[float]:
        """Ask all agents at once; return the seconds that each took."""
        if state == "disk":
            for agent in agents:
                prepare(agent)

        def ask(agent: str) -> float:
            moved_s = prepare(agent) if state == "peer" else 0.0
            answer = self._ask(agent, streams=streams)
            if len(agents) == 1:  # with several agents, the router may load the next one ahead
                _require_state(answer, state)
            return moved_s + (answer.ttft_s if streams else answer.total_s)

        with ThreadPoolExecutor(len(agents)) as threads:
            return list(threads.map(ask, agents))

    def _ask(self, agent: str, *, streams: bool) -> ChatAnswer:
        talk = self._talks[agent]
        answer = self._client.chat(talk, ANSWER_TOKENS, agent=agent, streams=streams)
        talk.append(answer.message())
        self._at[agent] = answer.headers["x-macfabric-node"]
        return answer

    def _evict(self, agent: str) -> float:
        self._client.call(f"/v1/agents/{agent}/evict", {"from": "memory"})
        return 0.0

    def _move(self, agent: str) -> float:
        """Move an agent to the other node; return the seconds of the move."""
        target = NODES[self._at[agent] == NODES[0]]
        return float(self._client.call(f"/v1/agents/{agent}/migrate", {"to": target})["seconds"])


def _require_state(answer: ChatAnswer, state: str) -> None:
    found = answer.headers["x-macfabric-cache"]
    if found != state:
        message = f"a turn that should be {state} was {found}: its time would mislead"
        raise RuntimeError(message)


def _cell(context: int, batch: int) -> str:
    return f"c{context}-b{batch}"


def _report(
    cells: MeasuredCells,
    parameters: Mapping[str, Any],
    contexts: Sequence[int],
    batches: Sequence[int],
) -> Report:
    figures: dict[str, Any] = {}
    for batch in batches:
        rows = {f"{context}": cells.get(_cell(context, batch)) for context in contexts}
        table = {context: _row(cell) for context, cell in rows.items() if cell is not None}
        if table:
            figures[f"seconds to the first token, {batch} at once"] = table
            figures[f"least, most and number of samples, {batch} at once"] = {
                context: {name: _spread(values) for name, values in cell.items()}
                for context, cell in rows.items()
                if cell is not None
            }
    ratios, limits = {}, []
    for context in contexts:
        cell = cells.get(_cell(context, 1))
        if cell is None:
            continue
        ratio = statistics.median(cell["cold"]) / statistics.median(cell["disk"])
        ratios[f"cold by disk at {context} tokens"] = ratio
        if context in DISK_RATIOS:
            statement = f"cold by disk at {context} tokens [x]"
            limits.append(Limit(statement, ratio, DISK_RATIOS[context], is_least=True))
    notes = ["streamed: until the first text; whole: until the answer of 8 tokens has arrived"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: cells are missing")
    return Report(
        parameters, figures, ratios, tuple(limits), tuple(notes), charts=_charts(cells, contexts)
    )


def _row(cell: Figures) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in cell.items()}


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}, {len(values)}"


def _charts(cells: MeasuredCells, contexts: Sequence[int]) -> tuple[Chart, ...]:
    lines: dict[str, list[tuple[float, float, float, float]]] = {}
    for context in contexts:
        cell = cells.get(_cell(context, 1)) or {}
        for state in STATES:
            if values := cell.get(state):
                point = (context, statistics.median(values), min(values), max(values))
                lines.setdefault(state, []).append(point)
    title = "Time to the first token, one agent"
    return (Chart(title, "tokens of context", "seconds", lines),) if lines else ()

"""Time to answers under each policy on three real nodes, one at a third of the others' speed.

The sessions are those of `macfabric simulate`, W4 (chat over a long history) and W6 (short agents
that wait for tools), with tokens divided by two and pauses by four. A real router places them on
real nodes in this process, whose speeds `benchmarks/paced_engine.py` sets. The policies are those
that the router offers, each on new nodes, with the same sessions in each repeat.
"""

import argparse
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.chat_client import ChatClient, Message
from benchmarks.large_model import write_model
from benchmarks.local_fabric import local_fabric
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.paced_engine import Pace, Paces, paced_nodes
from benchmarks.prompts import own_words, user
from benchmarks.report import Limit, Report, environment, say
from benchmarks.workload import Geometry
from fabric.settings import NodeSettings
from router.placement.choice import Policy
from router.simulate.catalog import find_workload
from router.simulate.sessions import Ask
from router.simulate.workload import Scale

DESCRIPTION = "three real nodes, one at a third of the speed: first tokens under each policy"

MODEL = Geometry(64, 128, 1, 1, 1, 64, 2_048)  # computed faster than the stated speeds
PREFILL_TOKENS_PER_S, DECODE_STEPS_PER_S = 600.0, 30.0
SLOWDOWN = 3.0  # of the last node
NODES = ("node-a", "node-b", "node-c")
TOKENS_DIVISOR, PAUSE_DIVISOR = 2, 4
SESSIONS = {"W4": 40, "W6": 60}
STARTS_PER_S = {"W4": 0.6, "W6": 0.95}  # three quarters of the nodes' prefill rate
REPEATS, QUICK_REPEATS = 3, 1
QUICK_SESSIONS, QUICK_TURNS, QUICK_SPEEDUP = 3, 2, 20.0
_SCALE = Scale(len(NODES), 0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument(
        "--workload", action="append", choices=sorted(SESSIONS), help="default: all"
    )
    parser.add_argument("--repeats", type=int, help=f"default: {REPEATS}")
    parser.add_argument("--slowdown", type=float, default=SLOWDOWN, help="of the last node")
    add_keep_argument(parser)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns of an agent, and their start."""

    name: str
    at_s: float
    asks: tuple[Ask, ...]


def run(arguments: argparse.Namespace) -> Report:
    """Run every policy with the same sessions."""
    workloads = arguments.workload or sorted(SESSIONS)
    repeats = arguments.repeats or (QUICK_REPEATS if arguments.quick else REPEATS)
    speedup = QUICK_SPEEDUP if arguments.quick else 1.0
    turns_max = QUICK_TURNS if arguments.quick else None
    parameters = {
        "nodes": len(NODES),
        "prefill of the fast nodes [tokens/s]": speedup * PREFILL_TOKENS_PER_S,
        "decode of the fast nodes [steps/s]": speedup * DECODE_STEPS_PER_S,
        "slowdown of the last node": arguments.slowdown,
        "sessions": {
            name: QUICK_SESSIONS if arguments.quick else SESSIONS[name] for name in workloads
        },
        "starts per second": {name: STARTS_PER_S[name] for name in workloads},
        "tokens divided by": TOKENS_DIVISOR,
        "pauses divided by": PAUSE_DIVISOR,
        "repeats": repeats,
    }
    cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
    with tempfile.TemporaryDirectory() as folder, cells.until_interrupted():
        bench = _Bench(write_model(Path(folder) / "model", MODEL), arguments.slowdown, speedup)
        for repeat in range(repeats):
            for workload in workloads:
                sessions = sessions_of(
                    workload, repeat, parameters["sessions"][workload], turns_max
                )
                for policy in _rotated(list(Policy), repeat):
                    name = _cell(workload, policy, repeat)
                    if name not in cells:
                        figures = bench.measure(sessions, policy)
                        cells.add(name, figures)
                        say(f"{name}: {statistics.fmean(figures['ttft_s']):.2f} s")
    cells.finish()
    return _report(cells, parameters, workloads, repeats)


def _cell(workload: str, policy: Policy, repeat: int) -> str:
    return f"{workload}, {policy}, repeat {repeat}"


def _rotated(policies: list[Policy], by: int) -> list[Policy]:
    """Return the policies in another order each time: the machine may slow down meanwhile."""
    by %= len(policies)
    return policies[by:] + policies[:by]


class _Bench:
    """Common parts of all runs."""

    def __init__(self, model: Path, slowdown: float, speedup: float) -> None:
        self._model = model
        self._slowdown = slowdown
        self._speedup = speedup  # of nodes and clients alike

    def measure(self, sessions: Sequence[Session], policy: Policy) -> Figures:
        """Play sessions under one policy, on new nodes."""
        slowdowns = [1.0] * (len(NODES) - 1) + [self._slowdown]
        prefill, decode = self._speedup * PREFILL_TOKENS_PER_S, self._speedup * DECODE_STEPS_PER_S
        paces = Paces([Pace(prefill / slower, decode / slower) for slower in slowdowns])
        settings = NodeSettings(durability="none")
        model = str(self._model)
        with (
            paced_nodes(paces),
            local_fabric(model, nodes=NODES, settings=settings, policy=policy) as fabric,
        ):
            player = _Player(fabric.client(), self._model, self._speedup)
            player.play(sessions)
        return {**player.figures, "late steps": [paces.late_share]}


def sessions_of(workload: str, seed: int, count: int, turns_max: int | None) -> list[Session]:
    """Return the sessions of a workload; equal arguments give equal ones."""
    source, random, at_s = find_workload(workload), Random(f"{workload}:{seed}"), 0.0
    sessions = []
    for number in range(count):
        at_s += random.expovariate(STARTS_PER_S[workload])
        (script,) = source.scripts_of(seed, number, _SCALE)
        sessions.append(Session(f"{workload}-{seed}-{number}", at_s, tuple(script)[:turns_max]))
    return sessions


class _Player:
    """Clients of all sessions, each in its own thread."""

    def __init__(self, client: ChatClient, model: Path, speedup: float) -> None:
        self._client = client
        self._model = model
        self._speedup = speedup
        self._lock = threading.Lock()
        self._problems: list[BaseException] = []
        self.figures: Figures = {"ttft_s": [], "total_s": [], "on another node": []}

    def play(self, sessions: Sequence[Session]) -> None:
        """Play all sessions to their ends; raise the first problem."""
        prepared = [(session, self._turns(session)) for session in sessions]
        began_s = time.monotonic()
        threads = [
            threading.Thread(target=self._guarded, args=(session, turns, began_s))
            for session, turns in prepared
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._problems:
            raise self._problems[0]

    def _turns(self, session: Session) -> list[tuple[float, list[Message], int]]:
        """Return pause, new messages and answer's tokens of each turn, prepared in advance."""
        turns = []
        for number, ask in enumerate(session.asks):
            texts = [
                own_words(self._model, max(8, tokens // TOKENS_DIVISOR), segment)
                for segment, tokens in ask.parts
            ]
            messages: list[Message] = []
            if number == 0:
                messages.append({"role": "system", "content": texts.pop(0)})
            messages.append(user("\n".join(texts)))
            answer_tokens = max(1, ask.answer_tokens // TOKENS_DIVISOR)
            turns.append((ask.delay_s / PAUSE_DIVISOR / self._speedup, messages, answer_tokens))
        return turns

    def _guarded(
        self, session: Session, turns: Sequence[tuple[float, list[Message], int]], began_s: float
    ) -> None:
        try:
            time.sleep(max(0.0, began_s + session.at_s / self._speedup - time.monotonic()))
            self._converse(session.name, turns)
        except Exception as error:  # noqa: BLE001 - raised again by `play`
            self._problems.append(error)

    def _converse(self, agent: str, turns: Sequence[tuple[float, list[Message], int]]) -> None:
        conversation: list[Message] = []
        node = None
        for pause_s, messages, answer_tokens in turns:
            time.sleep(pause_s)
            conversation += messages
            answer = self._client.chat(conversation, answer_tokens, agent=agent)
            conversation.append(answer.message())
            before, node = node, answer.headers["x-macfabric-node"]
            with self._lock:
                self.figures["ttft_s"].append(answer.ttft_s)
                self.figures["total_s"].append(answer.total_s)
                self.figures["on another node"].append(float(before not in (None, node)))


def _report(
    cells: MeasuredCells, parameters: Mapping[str, Any], workloads: Sequence[str], repeats: int
) -> Report:
    tables: dict[str, dict[str, dict[str, float]]] = {}
    ratios: dict[str, float] = {}
    limits = []
    late = []
    for workload in workloads:
        rows = tables[f"{workload} [s]"] = {}
        means: dict[Policy, list[float]] = {}
        for policy in Policy:
            found = [cells.get(_cell(workload, policy, repeat)) for repeat in range(repeats)]
            measured = [cell for cell in found if cell is not None]
            if len(measured) < repeats:
                continue
            late += [cell["late steps"][0] for cell in measured]
            means[policy] = [statistics.fmean(cell["ttft_s"]) for cell in measured]
            rows[policy.value] = _row(measured)
        for policy, values in means.items():
            if policy is Policy.SECONDS or Policy.SECONDS not in means:
                continue
            pairs = [other / own for other, own in zip(values, means[Policy.SECONDS], strict=True)]
            name = f"{workload}: {policy.value} by seconds"
            ratios[name] = math.exp(statistics.fmean(math.log(pair) for pair in pairs))
            ratios[f"{name}, least of the repeats"] = min(pairs)
            limits.append(Limit(f"{name}, mean first token", ratios[name], 1.0, is_least=True))
    notes = [
        f"the machine was too slow for {share:.1%} of the steps at most"
        for share in [max(late, default=0.0)]
    ]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    return Report(parameters, tables, ratios, tuple(limits), tuple(notes))


def _row(measured: Sequence[Figures]) -> dict[str, float]:
    first_s = [value for cell in measured for value in cell["ttft_s"]]
    total_s = [value for cell in measured for value in cell["total_s"]]
    moved = [value for cell in measured for value in cell["on another node"]]
    return {
        "first token, mean": statistics.fmean(first_s),
        "p50": statistics.median(first_s),
        "p95": statistics.quantiles(first_s, n=20)[-1] if len(first_s) > 1 else first_s[0],
        "last token, mean": statistics.fmean(total_s),
        "turns on another node": statistics.fmean(moved),
        "turns": float(len(first_s)),
    }

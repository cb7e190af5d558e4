"""Effect of each component, on against off, on one machine in one run.

persistence      a turn after a restart, against computing its prompt
4-bit caches     bytes per token in memory, against the model's own precision
ragged batch     answers of agents of unequal length, at once against one after the other
shared blocks    a new agent with a cached head, against one of a tenant without it
text matching    cached tokens of a sent-back history, against matching by tokens
shipping         a turn on another node with its cache, against computing its prompt there
heads in flight  simultaneous agents with one head, of one tenant against one tenant each
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import prefix
from benchmarks.chat_client import ChatAnswer, ChatClient, Message
from benchmarks.large_model import write_model
from benchmarks.local_fabric import LocalFabric, local_fabric
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.prompts import add_model_argument, model_folder, text_of, user
from benchmarks.report import Limit, Report, environment, say
from benchmarks.servers import short_folder
from fabric.settings import KvBits, NodeSettings, RouterSettings

DESCRIPTION = "each component on and off: persistence, 4 bits, batch, blocks, matching, shipping"

CONTEXT, QUICK_CONTEXT = 4_096, 768
ROUNDS, QUICK_ROUNDS = 3, 1
ANSWER_TOKENS = 32
AT_ONCE = 4
MATCHED_TURNS = 4
NODES = ("node-a", "node-b")
TENANTS = {f"tenant-{number}": f"key-of-tenant-{number}-of-benchmarks" for number in range(AT_ONCE)}
KEYS = tuple(TENANTS.values())


@dataclass(frozen=True, slots=True)
class Component:
    """Measurement with a component and without it."""

    figure: str
    measure: Callable[["Bench"], tuple[float, float]]  # on, off
    more_is_better: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    add_model_argument(parser)
    parser.add_argument("--context", type=int, help=f"tokens of a prompt (default: {CONTEXT})")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Measure each component."""
    context = arguments.context or (QUICK_CONTEXT if arguments.quick else CONTEXT)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
    with model_folder(arguments) as model:
        parameters = {"model": model.name, "context tokens": context, "rounds": rounds}
        cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
        bench = Bench(model, context)
        with cells.until_interrupted():
            for name, component in COMPONENTS.items():
                if name in cells:
                    continue
                cell: Figures = {"on": [], "off": []}
                for number in range(rounds):
                    say(f"{name}, round {number + 1} of {rounds}")
                    on, off = component.measure(bench)
                    cell["on"].append(on)
                    cell["off"].append(off)
                cells.add(name, cell)
    cells.finish()
    return _report(cells, parameters)


class Bench:
    """Fabrics and prompts of the measurements; prompts share a head only on purpose."""

    def __init__(self, model: Path, context: int) -> None:
        """Measure with prompts of `context` tokens."""
        self.model = model
        self.context = context
        self._count = 0

    def prompt(self, tokens: int | None = None) -> list[Message]:
        """Return a new prompt."""
        self._count += 1
        return [user(text_of(self.model, tokens or self.context, self._count))]

    def fabric(
        self,
        *,
        kv_bits: int = 4,
        active_max: int = AT_ONCE,
        nodes: int = 1,
        data: Path | None = None,
    ) -> AbstractContextManager[LocalFabric]:
        """Run a fabric with several tenants, which share nothing."""
        settings = NodeSettings(
            durability="none",
            popular_bytes=0,
            active_max=active_max,
            kv_bits=KvBits(kv_bits, kv_bits, kv_bits),
        )
        router = RouterSettings(api_keys=TENANTS, moves_idle_agents=False)
        return local_fabric(
            str(self.model), nodes=NODES[:nodes], settings=settings, router=router, data=data
        )


def _ask(client: ChatClient, agent: str, messages: list[Message]) -> ChatAnswer:
    answer = client.chat(messages, ANSWER_TOKENS, agent=agent)
    messages += [answer.message(), user("What next?")]
    return answer


def _together(calls: Sequence[Callable[[], ChatAnswer]]) -> list[ChatAnswer]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


# --- components ------------------------------------------------------------------------------


def _persistence(bench: Bench) -> tuple[float, float]:
    messages = bench.prompt()
    with short_folder() as data:
        with bench.fabric(data=data) as fabric:
            cold = _ask(fabric.client(KEYS[0]), "agent", messages)
        with bench.fabric(data=data) as fabric:  # the whole fabric was restarted
            warm = _ask(fabric.client(KEYS[0]), "agent", messages)
    return warm.ttft_s, cold.ttft_s


def _four_bits(bench: Bench) -> tuple[float, float]:
    figures = []
    for bits in (4, 0):
        with bench.fabric(kv_bits=bits) as fabric:
            _ask(fabric.client(KEYS[0]), "agent", bench.prompt())
            view = fabric.agent(NODES[0], "agent", next(iter(TENANTS))).view()
            figures.append(view.bytes.hot / view.tokens)
    return figures[0], figures[1]


def _ragged_batch(bench: Bench) -> tuple[float, float]:
    figures = []
    for active_max in (AT_ONCE, 1):
        with bench.fabric(active_max=active_max) as fabric:
            client = fabric.client(KEYS[0])
            talks = [bench.prompt(bench.context // (number + 1)) for number in range(AT_ONCE)]
            for number, talk in enumerate(talks):
                _ask(client, f"agent-{number}", talk)
            answers = _together(
                [partial(_ask, client, f"agent-{n}", talk) for n, talk in enumerate(talks)]
            )
        spent_s = max(a.ended_s for a in answers) - min(a.began_s for a in answers)
        figures.append(AT_ONCE * ANSWER_TOKENS / spent_s)
    return figures[0], figures[1]


def _shared_blocks(bench: Bench) -> tuple[float, float]:
    head = bench.prompt()
    with bench.fabric() as fabric:
        _ask(fabric.client(KEYS[0]), "first", list(head))
        known = _ask(fabric.client(KEYS[0]), "second", list(head))
        unknown = _ask(fabric.client(KEYS[1]), "second", list(head))
    return known.ttft_s, unknown.ttft_s


def _text_matching(_: Bench) -> tuple[float, float]:
    with short_folder() as folder:
        model = write_model(folder / "model", prefix.SMALL)
        with local_fabric(str(model)) as fabric:
            change = prefix.CHANGES["stripped"]
            row = prefix.matched(fabric, model, "stripped", change, MATCHED_TURNS)
    return row["by characters"], row["by tokens"]


def _shipping(bench: Bench) -> tuple[float, float]:
    messages = bench.prompt()
    with bench.fabric(nodes=2) as fabric:
        client = fabric.client(KEYS[0])
        cold = _ask(client, "agent", messages)
        target = NODES[cold.headers["x-macfabric-node"] == NODES[0]]
        receipt = client.call("/v1/agents/agent/migrate", {"to": target})
        moved = _ask(client, "agent", messages)
    return float(receipt["seconds"]) + moved.ttft_s, cold.ttft_s


def _heads_in_flight(bench: Bench) -> tuple[float, float]:
    figures = []
    for keys in (KEYS[:1] * AT_ONCE, KEYS):
        head = bench.prompt()
        with bench.fabric() as fabric:
            answers = _together(
                [partial(_ask, fabric.client(key), f"agent-{n}", list(head))
                 for n, key in enumerate(keys)]
            )  # fmt: skip
        figures.append(max(answer.ttft_s for answer in answers))
    return figures[0], figures[1]


COMPONENTS = {
    "persistence": Component("first token after a restart [s]", _persistence),
    "4-bit caches": Component("bytes per token in memory", _four_bits),
    "ragged batch": Component(f"tokens/s of {AT_ONCE} agents", _ragged_batch, more_is_better=True),
    "shared blocks": Component("first token of a new agent [s]", _shared_blocks),
    "text matching": Component("share of a history reused", _text_matching, more_is_better=True),
    "shipping": Component("move and first token [s]", _shipping),
    "heads in flight": Component(f"slowest first token of {AT_ONCE} [s]", _heads_in_flight),
}


def _report(cells: MeasuredCells, parameters: Mapping[str, object]) -> Report:
    table: dict[str, dict[str, float | str]] = {}
    gains: dict[str, float] = {}
    for name, component in COMPONENTS.items():
        cell = cells.get(name)
        if cell is None:
            continue
        on, off = (statistics.median(cell[key]) for key in ("on", "off"))
        gains[name] = on / off if component.more_is_better else off / on
        table[name] = {"figure": component.figure, "on": on, "off": off, "gain": gains[name]}
    limits = tuple(
        Limit(f"{name}: gain [x]", gain, 1.0, is_least=True) for name, gain in gains.items()
    )
    notes = ["medians over the rounds; tenants share nothing, so another tenant's agent is `off`"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    return Report(parameters, {"component": table}, gains, limits, tuple(notes))

"""Number of agents in a node's memory, and times of their turns, by bits of the cache.

Each node gets the same memory for caches: as much as three agents take in the model's own
precision. Agents are created one after the other, then each has another turn, in the same order.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.chat_client import ChatClient, Message
from benchmarks.local_fabric import local_fabric
from benchmarks.measured_cells import Figures, MeasuredCells, add_keep_argument
from benchmarks.prompts import add_model_argument, model_folder, text_of, user
from benchmarks.report import Limit, Report, environment, say
from fabric.settings import KvBits, NodeSettings
from node.limits import ROOM_TOKENS

DESCRIPTION = "agents in the memory of one node with caches of 4, 8 and 16 or 32 bits"

CONTEXT, QUICK_CONTEXT = 8_192, 1_024
AGENTS, QUICK_AGENTS = 16, 14
HELD_IN_FULL = 3  # agents that fit the memory in the model's own precision
ANSWER_TOKENS = 8
BITS = {"4 bits": 4, "8 bits": 8, "the model's own": 0}
MORE_AGENTS_MIN = 3.0  # in 4 bits, to one in 16; in 32 bits, as here without a GPU, twice that
NODE = "node-a"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    add_model_argument(parser)
    parser.add_argument("--context", type=int, help=f"tokens of each agent (default: {CONTEXT})")
    parser.add_argument("--agents", type=int, help=f"default: {AGENTS}")
    add_keep_argument(parser)


def run(arguments: argparse.Namespace) -> Report:
    """Fill a node with each kind of cache."""
    context = arguments.context or (QUICK_CONTEXT if arguments.quick else CONTEXT)
    agents = arguments.agents or (QUICK_AGENTS if arguments.quick else AGENTS)
    with model_folder(arguments) as model:
        parameters = {"model": model.name, "context tokens": context, "agents": agents}
        cells = MeasuredCells(arguments.keep, {**parameters, **environment()})
        with cells.until_interrupted():
            budget_bytes = _budget_bytes(str(model), context)
            for name, bits in BITS.items():
                if name not in cells:
                    say(f"{agents} agents with caches of {name}")
                    cells.add(name, _filled(model, bits, budget_bytes, context, agents))
    cells.finish()
    return _report(cells, parameters)


def _budget_bytes(model: str, context: int) -> int:
    """Return the bytes of HELD_IN_FULL agents of this context in the model's own precision."""
    settings = NodeSettings(durability="none", kv_bits=KvBits(0, 0, 0))
    with local_fabric(model, settings=settings) as fabric:
        spec = fabric.node(NODE).node.resources.store.spec
        return HELD_IN_FULL * spec.resident_bytes(context + ROOM_TOKENS)


def _filled(model: Path, bits: int, budget_bytes: int, context: int, agents: int) -> Figures:
    kv_bits = KvBits(bits, bits, bits)
    settings = NodeSettings(durability="none", popular_bytes=0, kv_bits=kv_bits)
    with local_fabric(str(model), settings=settings) as fabric:
        fabric.hold(NODE, budget_bytes)
        client = fabric.client()
        talks: dict[str, list[Message]] = {}
        for number in range(agents):
            name = f"agent-{number}"
            talks[name] = [user(text_of(model, context, name))]
            _ask(client, name, talks[name])
        views = [fabric.agent(NODE, name).view() for name in talks]
        hot = [view for view in views if "hot" in view.tiers]
        later = []
        for name, talk in talks.items():
            talk.append(user("What next?"))
            later.append(_ask(client, name, talk))
    return {
        "in memory": [float(len(hot))],
        "bytes per token": [view.bytes.hot / view.tokens for view in hot],
        "first token of a second turn [s]": later,
    }


def _ask(client: ChatClient, agent: str, talk: list[Message]) -> float:
    answer = client.chat(talk, ANSWER_TOKENS, agent=agent)
    talk.append(answer.message())
    return answer.ttft_s


def _report(cells: MeasuredCells, parameters: dict[str, Any]) -> Report:
    table: dict[str, dict[str, float]] = {}
    for name in BITS:
        cell = cells.get(name)
        if cell is not None:
            table[name] = {key: statistics.median(values) for key, values in cell.items()}
    ratios, limits = {}, []
    if len(table) == len(BITS):
        four, own = (table[name]["in memory"] for name in ("4 bits", "the model's own"))
        ratios["agents in 4 bits by agents in the model's own"] = four / own
        statement = "agents in memory, 4 bits by the model's own [x]"
        limits.append(Limit(statement, four / own, MORE_AGENTS_MIN, is_least=True))
    notes = ["turns of agents that are not in memory read their cache from disk"]
    if cells.is_interrupted:
        notes.append("the run was interrupted: rows are missing")
    return Report(parameters, {"cache": table}, ratios, tuple(limits), tuple(notes))

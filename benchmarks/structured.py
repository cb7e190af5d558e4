"""Answers constrained by a JSON schema against free ones, one and eight at once, on a real node.

Likewise forced calls, whose arguments match a schema. All use the same random model with a large
vocabulary, and alternate with free answers. The schema's values do not end within the measured
tokens, so both are equally long.
"""

import argparse
import asyncio
import itertools
import json
import tempfile
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path

from benchmarks.contest import contest, judged_clock, rate_ratios, rates
from benchmarks.large_model import write_model
from benchmarks.report import Limit, Report, say
from benchmarks.workload import Geometry
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.settings import NodeSettings
from fabric.turn.answer_constraints import ANY_CALLS, CallChoice, schema_format
from fabric.turn.generation import (
    Finished,
    FinishReason,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from fabric.turn.messages import Message, MessageRole
from node.service import NodeConfig, NodeService

DESCRIPTION = "tokens per second and first tokens of schemas and forced calls, against free answers"

MODEL = Geometry(256, 768, 2, 4, 2, 64, 151_936)
QUICK_MODEL = Geometry(128, 256, 1, 2, 1, 64, 8_192)
TOKENS, QUICK_TOKENS = 32, 8
ROUNDS = 6
SINGLE_ROUNDS = 4  # rounds of single answers for each of a batch: theirs are short, and vary more
FIRST_ROUNDS = 30  # rounds of answers of one token
PROMPT = "the cat sat on the mat and the dog sat on the log. " * 8

RATE_RATIO_MIN = 0.9
FIRST_RATIO_MIN = 0.95  # a first token should cost no more, apart from other load on the machine
ITEM = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "kind": {"enum": ["city", "river", "mountain"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 10_000},
        "names": {"type": "array", "items": {"type": "string", "minLength": 2}},
        "place": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]+$"}]},
    },
    "required": ["title", "kind", "size", "names", "place"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1_000}
OUTPUT = schema_format(SCHEMA, is_strict=True)
TOOL = {
    "type": "function",
    "function": {
        "name": "list_places",
        "parameters": {
            "type": "object",
            "properties": {"places": SCHEMA},
            "required": ["places"],
            "additionalProperties": False,
        },
    },
}
NOTE = "the model is random: what is measured is the step and its mask, not how a schema is met"
_operations = itertools.count()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="of a batch (default: %(default)s)"
    )


class Way(StrEnum):
    """Kind of answer, and the kind with which it is compared."""

    SCHEMA = "schema"
    FREE = "free"
    CALL = "call"
    FREE_CHAT = "free_chat"  # the same messages and tools, without parsing calls

    def request(self, number: int, tokens: int) -> GenerateRequest:
        """Return one agent's request."""
        must_call, is_chat = self is Way.CALL, self in (Way.CALL, Way.FREE_CHAT)
        text = f"{number} {PROMPT}"
        output = OUTPUT if self is Way.SCHEMA else None
        return GenerateRequest(
            OperationId(f"benchmark-{next(_operations)}"),
            TenantId("default"),
            Identity(IdentityKind.AGENT, AgentId(f"agent-{number}")),
            Sampling(max_tokens=tokens, ignore_eos=output is None and not must_call, output=output),
            messages=(Message(MessageRole.USER, (text,)),) if is_chat else None,
            prompt=None if is_chat else text,
            tools=[TOOL] if is_chat else None,
            reads_calls=must_call,
            calls=CallChoice(must_call, strict=("list_places",), takes_one=True)
            if must_call
            else ANY_CALLS,
        )


PAIRS = {"": (Way.SCHEMA, Way.FREE), "call_": (Way.CALL, Way.FREE_CHAT)}


class Asker:
    """Client that requests several answers at once from a node."""

    def __init__(self, service: NodeService) -> None:
        self._service = service

    def ask(self, way: Way, count: int, tokens: int) -> int:
        """Request `count` answers; return the number of tokens."""
        work = self._ask_all(way, count, tokens)
        return asyncio.run_coroutine_threadsafe(work, self._service._loop).result()  # noqa: SLF001

    async def _ask_all(self, way: Way, count: int, tokens: int) -> int:
        return sum(await asyncio.gather(*(self._one(way, n, tokens) for n in range(count))))

    async def _one(self, way: Way, number: int, tokens: int) -> int:
        request = way.request(number, tokens)
        events = [event async for event in self._service.node.turns.serve(request)]
        last = events[-1]
        assert isinstance(last, Finished), last
        assert last.reason is FinishReason.LENGTH, "answers differ in length"
        return last.completion_tokens


def run(arguments: argparse.Namespace) -> Report:
    """Compare them one at a time and in a batch, then their first tokens."""
    quick = arguments.quick
    shape, tokens = (QUICK_MODEL, QUICK_TOKENS) if quick else (MODEL, TOKENS)
    rounds, first_rounds = (1, 1) if quick else (arguments.rounds, FIRST_ROUNDS)
    figures: dict[str, dict[str, float]] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        say(f"writing a model of {shape.vocabulary:,} tokens")
        service = _service(Path(folder), write_model(Path(folder) / "model", shape))
        service.start()
        try:
            asker = Asker(service)
            loads = {
                "batch_1": (1, tokens, rounds * SINGLE_ROUNDS),
                "batch_8": (8, tokens, rounds),
                "first": (1, 1, first_rounds),
            }
            for (pair, ways), load in itertools.product(PAIRS.items(), loads):
                count, length, times = loads[load]
                works: Mapping[str, Callable[[], int]] = {
                    way.value: partial(asker.ask, way, count, length) for way in ways
                }
                spent = contest(f"{pair}{load}", works, times)
                figures |= {f"{pair}{load} {side}": rates(taken) for side, taken in spent.items()}
                related = rate_ratios(*(spent[way.value] for way in ways))
                ratios |= {f"{pair}{load}.{name}": value for name, value in related.items()}
        finally:
            service.stop()
    parameters = {
        "model": shape.as_parameters(),
        "schema_bytes": len(json.dumps(SCHEMA)),
        "tokens": tokens,
        "rounds": rounds,
        "judged_clock": judged_clock(),
    }
    return Report(parameters, {"load": figures}, ratios, limits(ratios), (NOTE,))


def limits(ratios: Mapping[str, float]) -> tuple[Limit, ...]:
    """Return the limits of the ratios."""
    clock = judged_clock()
    bounds = {
        "batch_1": ("tokens/s over a free answer's, batch of 1", RATE_RATIO_MIN),
        "batch_8": ("tokens/s over a free answer's, batch of 8", RATE_RATIO_MIN),
        "first": ("first tokens/s over a free answer's, the schema known", FIRST_RATIO_MIN),
    }  # fmt: skip
    return tuple(
        Limit(
            f"{ways[0].value}: {statement}, {clock} time",
            ratios[f"{pair}{load}.{clock}"],
            bound,
            is_least=True,
        )
        for pair, ways in PAIRS.items()
        for load, (statement, bound) in bounds.items()
    )


def _service(folder: Path, model: Path) -> NodeService:
    settings = NodeSettings(durability="none")
    name = NodeName("structured")
    config = NodeConfig(
        name, folder / "data", str(model), bytes(range(32)), settings, "127.0.0.1", 1
    )
    return NodeService(config)

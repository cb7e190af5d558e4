"""Compare computing and borrowing documents that each agent reads in another order.

A first agent reads all documents. Then many others, one after the other, read them in different
orders and are asked for a fact in one of them. Two arms: exact (only prefixes are reused) and
anywhere (documents are borrowed from other positions).
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Limit, Report, say
from fabric.edit_mode import EditMode
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.settings import NodeSettings
from fabric.turn.generation import (
    Admitted,
    Delta,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from fabric.turn.messages import Message, MessageRole
from node.service import NodeConfig, NodeService
from router.cli.demo.demo_script import CLOSINGS, OPENINGS, THINGS, VALUES

DESCRIPTION = "documents in another order per agent: computed, or borrowed from earlier readers"

ARMS = {"exact": EditMode.FORGET, "anywhere": EditMode.ANYWHERE}
DOCUMENTS, QUICK_DOCUMENTS = 8, 3
AGENTS, QUICK_AGENTS = 8, 1
NOTES, QUICK_NOTES = 12, 6  # sentences of each document, about 30 tokens each
HITS_MORE_MIN = 0.5
ANSWER_TOKENS = 16
_operations = itertools.count()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--model", default="recall", help="a bundled model or a folder")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a fact in it."""

    text: str
    question: str
    value: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Time and answer of one turn."""

    first_s: float
    prompt_tokens: int
    cached_tokens: int
    is_right: bool


def run(arguments: argparse.Namespace) -> Report:
    """Compare the arms."""
    quick = arguments.quick
    rng = random.Random(arguments.seed)
    count = QUICK_DOCUMENTS if quick else DOCUMENTS
    agents = QUICK_AGENTS if quick else AGENTS
    notes = QUICK_NOTES if quick else NOTES
    documents = [_document(rng, number, notes) for number in range(count)]
    orders = [rng.sample(documents, count) for _ in range(agents)]
    turns: dict[str, list[Turn]] = {}
    with tempfile.TemporaryDirectory() as folder:
        service = _service(Path(folder), arguments.model)
        service.start()
        try:
            for arm, mode in ARMS.items():
                say(f"{agents} agents, {count} documents, {arm}")
                _ask(service, arm, "first", documents, mode)
                turns[arm] = [
                    _ask(service, arm, f"agent-{number}", order, mode)
                    for number, order in enumerate(orders)
                ]
        finally:
            service.stop()
    figures = {arm: _row(each) for arm, each in turns.items()}
    return _report(arguments.model, agents, figures)


def _report(model: str, agents: int, figures: Mapping[str, Mapping[str, float]]) -> Report:
    exact, anywhere = figures["exact"], figures["anywhere"]
    more = anywhere["cached_share"] - exact["cached_share"]
    sooner = anywhere["first_token_s"] / exact["first_token_s"]
    limits = (
        Limit("cached share above the prefix's", more, HITS_MORE_MIN, is_least=True),
        Limit("first token by the prefix's", sooner, 1.0, is_least=False),
    )
    parameters = {"model": model, "agents": agents}
    ratios = {"hits_more": more, "first_by_exact": sooner}
    return Report(parameters, {"arms": figures}, ratios, limits)


def _row(turns: Sequence[Turn]) -> dict[str, float]:
    prompt_tokens = sum(turn.prompt_tokens for turn in turns)
    return {
        "first_token_s": statistics.median(turn.first_s for turn in turns),
        "cached_share": sum(turn.cached_tokens for turn in turns) / prompt_tokens,
        "right": sum(turn.is_right for turn in turns) / len(turns),
        "prompt_tokens": prompt_tokens / len(turns),
    }


def _document(rng: random.Random, number: int, notes: int) -> Document:
    value = " ".join(rng.sample(VALUES, 4))
    question = f"The code {number} of the {rng.choice(THINGS)} is"
    lines = [_note(rng) for _ in range(notes)]
    lines.insert(rng.randrange(len(lines)), f"{question} {value}.")
    return Document(" ".join(lines), question, value)


def _note(rng: random.Random) -> str:
    things = rng.sample(THINGS, 5)
    opening = rng.choice(OPENINGS).format(*things[:3])
    return f"{opening} {rng.choice(CLOSINGS).format(*things[3:])}"


def _ask(
    service: NodeService, arm: str, agent: str, documents: Sequence[Document], mode: EditMode
) -> Turn:
    """Send documents in one message, and ask for the fact in the first of them."""
    read = "\n\n".join(document.text for document in documents)
    source = documents[0]
    # Each arm is its own tenant, without the others' caches.
    request = GenerateRequest(
        OperationId(f"benchmark-{next(_operations)}"),
        TenantId(arm),
        Identity(IdentityKind.AGENT, AgentId(agent)),
        Sampling(max_tokens=ANSWER_TOKENS),
        messages=(
            Message(MessageRole.SYSTEM, ("You remember what you are told.",)),
            Message(MessageRole.USER, (read,)),
            Message(MessageRole.ASSISTANT, ("Noted.",)),
            Message(MessageRole.USER, (source.question,)),
        ),
        edits=mode,
    )
    work = _answer(service, request, source.value)
    return asyncio.run_coroutine_threadsafe(work, service._loop).result()  # noqa: SLF001


async def _answer(service: NodeService, request: GenerateRequest, value: str) -> Turn:
    began_s, first_s, texts = time.perf_counter(), 0.0, []
    prompt_tokens = cached_tokens = 0
    async for event in service.node.turns.serve(request):
        if isinstance(event, Admitted):
            prompt_tokens, cached_tokens = event.prompt_tokens, event.cached_tokens
        elif isinstance(event, Delta):
            first_s = first_s or time.perf_counter() - began_s
            texts.append(event.text)
    return Turn(first_s, prompt_tokens, cached_tokens, value in "".join(texts))


def _service(folder: Path, model: str) -> NodeService:
    settings = NodeSettings(durability="none")
    name, key = NodeName("spans"), bytes(range(32))
    return NodeService(NodeConfig(name, folder / "data", model, key, settings, "127.0.0.1", 1))

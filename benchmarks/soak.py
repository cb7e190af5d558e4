"""Thousands of mixed requests to one node, with cancellations, then a search for leaks.

Agents by name, by group and by content; greedy and seeded sampling, stop strings, log
probabilities; clients that hang up at any moment; erasures and dropped caches in between.
Afterwards the store must be consistent, nothing may stay pinned or reserved, and memory must not
exceed its level after the first quarter.
"""

import argparse
import asyncio
import itertools
import json
import random
import resource
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.report import Limit, Report, say
from fabric.control.calls import encode_call
from fabric.control.erasure_calls import EraseAgent
from fabric.control.node_calls import Flush
from fabric.errors import FabricError
from fabric.hosting.clock import SystemClock
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.settings import NodeSettings
from fabric.turn.generation import (
    Delta,
    Failed,
    Finished,
    GenerateRequest,
    Identity,
    IdentityKind,
    Priority,
    Sampling,
)
from fabric.turn.messages import Message, MessageRole
from node.service import NodeConfig, NodeService

DESCRIPTION = "2,000 mixed requests with cancels: integrity and memory afterwards"

REQUESTS = 2_000
QUICK_REQUESTS = 30
TOGETHER = 8
TENANTS = ("default", "other")
AGENTS = 12
_epochs = itertools.count(1 << 24, 1 << 16)  # each erasure has a higher epoch than all turns so far
MEMORY_RATIO_MAX = 1.10
HOT_BYTES = 4 << 20  # for a few agents: the others are evicted and restored all the time
_WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    "and",
    "the",
    "dog",
    "sat",
    "on",
    "the",
    "log",
    "größer",
    "東京",
    "naïve",
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare this benchmark's own options."""
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="recall", help="a bundled model or a folder")


@dataclass(slots=True)
class Tally:
    """Counts of events, and samples of memory."""

    outcomes: Counter[str] = field(default_factory=Counter)
    resident_bytes: list[int] = field(default_factory=list)
    active_bytes: list[int] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> Report:
    """Run the soak."""
    count = QUICK_REQUESTS if arguments.quick else arguments.requests
    with tempfile.TemporaryDirectory() as folder:
        service = _service(Path(folder), arguments.model)
        service.start()
        try:
            tally = Tally()
            work = _drive(service, count, arguments.seed, tally)
            asyncio.run_coroutine_threadsafe(work, service._loop).result()  # noqa: SLF001
            problems = _problems(service)
            leaked_bytes = _leaked_bytes(service)
        finally:
            service.stop()
    quarter = max(1, len(tally.active_bytes) // 4)
    ratios = {
        "resident memory, end by first quarter": _last_by_first(tally.resident_bytes, quarter),
        "array memory, end by first quarter": _last_by_first(tally.active_bytes, quarter),
    }
    limits = [
        Limit("problems found in the store", len(problems), 0, is_least=False),
        Limit("failed requests", tally.outcomes["failed"], 0, is_least=False),
        Limit("memory still reserved or pinned [bytes, blocks]", leaked_bytes, 0, is_least=False),
    ]
    if not arguments.quick:
        limits += [Limit(name, r, MEMORY_RATIO_MAX, is_least=False) for name, r in ratios.items()]
    return Report(
        parameters={"requests": count, "seed": arguments.seed, "at once": TOGETHER},
        figures={"outcomes": dict(tally.outcomes), "problems": problems},
        ratios=ratios,
        limits=tuple(limits),
    )


def _service(folder: Path, model: str) -> NodeService:
    settings = NodeSettings(hot_bytes=HOT_BYTES, durability="none")
    return NodeService(
        NodeConfig(
            NodeName("soak"), folder / "soak", model, bytes(range(32)), settings, "127.0.0.1", 1
        )
    )


async def _drive(service: NodeService, count: int, seed: int, tally: Tally) -> None:
    rng = random.Random(seed)
    slots = asyncio.Semaphore(TOGETHER)
    histories: dict[str, list[Message]] = {}

    async def one(index: int) -> None:
        async with slots:
            await _request(service, random.Random(f"{seed}:{index}"), histories, tally)

    for start in range(0, count, TOGETHER * 4):
        batch = range(start, min(start + TOGETHER * 4, count))
        await asyncio.gather(*(one(index) for index in batch))
        if rng.random() < 0.2:
            await _control(service, Flush(drop_hot=rng.random() < 0.5))
        if rng.random() < 0.2:
            tenant, agent = TenantId(rng.choice(TENANTS)), f"agent-{rng.randrange(AGENTS)}"
            await _control(service, _erasure(tenant, agent, rng))
            histories.pop(f"{tenant}:{agent}", None)
        await _erase_unnamed(service, rng)
        tally.resident_bytes.append(_resident_bytes())
        tally.active_bytes.append(int(mx.get_active_memory()))
        held = f"{tally.resident_bytes[-1] >> 20} MiB resident"
        held += (
            f", {tally.active_bytes[-1] >> 20} in arrays, {mx.get_cache_memory() >> 20} to reuse"
        )
        say(f"{batch.stop} of {count} requests: {json.dumps(dict(tally.outcomes))}; {held}")


def _erasure(tenant: TenantId, agent: str, rng: random.Random) -> EraseAgent:
    operation = OperationId(f"erase-{rng.randrange(1 << 40):012d}")
    now_s = SystemClock().wall_s()
    return EraseAgent(tenant, AgentId(agent), next(_epochs), operation, now_s)


async def _erase_unnamed(service: NodeService, rng: random.Random) -> None:
    """Erase unnamed conversations, to keep the number of agents steady."""
    for agent in list(service.node.resources.table):
        tenant, name = agent.key
        if name.startswith("auto-") or "~" in name:
            await _control(service, _erasure(tenant, name, rng))


async def _control(service: NodeService, call: Any) -> None:
    await service._calls.answer(encode_call(call))  # type: ignore[union-attr] # noqa: SLF001


async def _request(
    service: NodeService,
    rng: random.Random,
    histories: dict[str, list[Message]],
    tally: Tally,
) -> None:
    request, key = _make_request(rng, histories)
    hang_up_after = rng.choice([None, None, None, 0, 1, 5])
    text, events_count = "", 0
    events = service.node.turns.serve(request)
    try:
        async for event in events:
            if isinstance(event, Failed):
                tally.outcomes["failed"] += 1
                return
            if isinstance(event, Finished):
                tally.outcomes["finished"] += 1
            if isinstance(event, Delta):
                text, events_count = text + event.text, events_count + 1
            if hang_up_after is not None and events_count >= hang_up_after:
                tally.outcomes["hung up"] += 1
                return
    except FabricError as error:
        tally.outcomes["refused" if error.status < 500 else "retry later"] += 1
        return
    finally:
        await events.aclose()  # type: ignore[attr-defined]
    if key is not None:
        histories[key] = [*(request.messages or ()), Message(MessageRole.ASSISTANT, (text,))]


def _make_request(
    rng: random.Random, histories: dict[str, list[Message]]
) -> tuple[GenerateRequest, str | None]:
    tenant = TenantId(rng.choice(TENANTS))
    words = " ".join(rng.choices(_WORDS, k=rng.choice([3, 10, 40, 120])))
    kind = rng.choice([IdentityKind.AGENT, IdentityKind.AGENT, *IdentityKind])
    agent, key = None, None
    messages = [Message(MessageRole.SYSTEM, ("you remember. " * 20,))]
    if kind is not IdentityKind.CONTENT:
        agent = AgentId(f"agent-{rng.randrange(AGENTS)}")
    if kind is IdentityKind.AGENT:
        key = f"{tenant}:{agent}"
        messages = histories.get(key, messages) if rng.random() < 0.7 else messages
    if sum(len(text) for message in messages for text in message.texts) > 2_500:
        messages = messages[:1]
    messages = [*messages, Message(MessageRole.USER, (words,))]
    sampling = Sampling(
        max_tokens=rng.choice([1, 4, 12]),
        temperature=rng.choice([0.0, 0.0, 0.9]),
        seed=rng.randrange(100),
        logprobs=rng.choice([None, None, 2]),
        stop=rng.choice([(), (), ("the",)]),
        repetition_penalty=rng.choice([1.0, 1.2]),
    )
    operation = OperationId(f"soak-{rng.randrange(1 << 40):012d}")
    request = GenerateRequest(
        operation, tenant, Identity(kind, agent), sampling, tuple(messages),
        priority=rng.choice(list(Priority)),
    )  # fmt: skip
    return request, key


def _problems(service: NodeService) -> list[str]:
    return service.node.resources.store.blocks.check_integrity()


def _leaked_bytes(service: NodeService) -> int:
    """Return the leaked bytes: reservations, and blocks without a record."""
    node = service.node
    records = [agent.saved for agent in node.resources.table if agent.saved is not None]
    needed = {ref for record in records for ref in record.refs}
    stored = node.resources.store.blocks.total_bytes
    needed_bytes = sum(node.resources.store.blocks._files.file_bytes(ref) for ref in needed)  # noqa: SLF001
    return node.resources.engine.budget.reserved_bytes + abs(stored - needed_bytes)


def _resident_bytes() -> int:
    """Return this process's resident memory, or its peak if only that is known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _last_by_first(values: list[int], quarter: int) -> float:
    return max(values[-quarter:]) / max(values[:quarter])

"""A router over nodes in memory: its own services, connected by encoded calls only.

The nodes have no model and no sockets. They answer in separate tasks, so that the router's CPU
time can be measured alone.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fabric.control.calls import ErrorReply, decode_call, encode_reply
from fabric.control.change_calls import AgentChanges, AgentRow, DescribeChanges, ListChanges
from fabric.control.erasure_calls import KnownErasures, ShareErasures
from fabric.control.node_calls import (
    READY,
    AgentSketch,
    AgentView,
    Done,
    LastMatch,
    NodeView,
    SelfTest,
    TierBytes,
)
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.net.links import Address, LinkKind, LinkView, PeerList
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from fabric.turn.generation import Identity, IdentityKind, Sampling
from node.net.link_table import LinkChanges
from node.view_history import ViewHistory
from router.fleet.fleet import NodeAccess
from router.fleet.node_client import ControlTransport, NodeLink
from router.fleet.node_http import NodeHttp
from router.prompt import Prompt
from router.services import Services, assemble
from router.turn_request import TurnRequest

MODEL = "bench"
TENANT = TenantId("bench")
PIECES = 100  # chunks of an agent's sketch: 51 KB of text, 12,800 tokens
PIECE_BYTES = 512
HEAD_PIECES = 32  # shared by all agents at their beginning
NEW_PIECES = 4  # of one turn
AGENTS_PER_PART = 22  # of a list with whole sketches, as a node sends it
LISTS_AT_ONCE = 16
PREFILL = (300.0, 800.0, 1_200.0)  # tokens per second, of three classes of machine
_KEY = bytes(32)
_NEVER = 1e9


class HeldClock:
    """Clock that stands still until released, so that no lease expires before heartbeats begin."""

    def __init__(self) -> None:
        self._held_s: float | None = time.monotonic()
        self._lag_s = 0.0

    def release(self) -> None:
        """Continue the clock from its present time."""
        if self._held_s is not None:
            self._lag_s, self._held_s = time.monotonic() - self._held_s, None

    def monotonic_s(self) -> float:
        return self._held_s if self._held_s is not None else time.monotonic() - self._lag_s

    def wall_s(self) -> float:
        return 1.7e9


class MemoryNode:
    """Node in memory that answers a router's calls."""

    def __init__(self, number: int, agents_count: int, draw: random.Random) -> None:
        self.name = NodeName(f"node-{number:04}")
        self.agents = [agent_of(self.name, n, draw) for n in range(agents_count)]
        prefill = draw.choice(PREFILL) * draw.uniform(0.9, 1.1)
        host = f"10.{number // 65_000}.{number // 250}.{number % 250 + 1}"
        self.view = NodeView(
            name=self.name,
            host=host,
            pid=1,
            incarnation=1,
            http_url=f"http://{host}:8100",
            model=MODEL,
            fingerprint="f" * 64,
            context_tokens_max=131_072,
            state=READY,
            agents=agents_count,
            tokens=agents_count * PIECES * PIECE_BYTES // 4,
            bytes=TierBytes(1 << 30, 8 << 30),
            addresses=(Address(host, 7_000, LinkKind.ETHERNET, 10_000, "en0", prefix_bits=24),),
            waiting=0,
            active=0,
            queue_s=0.0,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=draw.uniform(20.0, 60.0),
            bytes_per_token=36_864,
            self_test=SelfTest(passed=True, detail="", seconds=0.0),
            changes=agents_count,
            free=TierBytes(8 << 30, 64 << 30),
        )
        self.history = ViewHistory()
        self._agents_count = agents_count  # changes are numbered from the node's start

    def measure(self, peers: list["MemoryNode"]) -> None:
        """Add a measured link to each peer to the node's reports."""
        links = (
            LinkView(
                peer.name,
                peer.view.host,
                7_000,
                LinkKind.ETHERNET,
                "en0",
                "en0",
                reachable=True,
                rtt_s=0.0003,
                bytes_per_s=1.1e9,
                age_s=1.0,
                rate_age_s=30.0,
            )
            for peer in peers
        )
        self.view = replace(self.view, links=tuple(links))

    def change(self, number: int) -> None:
        """End a turn of one agent: its record and the node's view change."""
        agent = self.agents.pop(number % len(self.agents))
        revision, tail = agent.view.revision + 1, f"{number:016x}"
        view = replace(agent.view, revision=revision, tail=tail)
        more = (number << 32 | at for at in range(NEW_PIECES))
        self.agents.append(replace(agent, view=view, sketch=(*agent.sketch, *more)))
        self.view = replace(self.view, changes=self.view.changes + 1)

    def _list_changes(self, since: int) -> AgentChanges:
        """Return the next part of the changed agents, the oldest change first."""
        first = self.view.changes - len(self.agents)  # each of these agents changed once after it
        listed = self.agents[max(0, since - first) :][:AGENTS_PER_PART]
        upto = max(first, since) + len(listed)
        rows = tuple(
            self._row(item, has_sketch=max(first, since) + at < self._agents_count)
            for at, item in enumerate(listed)
        )
        return AgentChanges(1, upto, since, rows, None, upto < self.view.changes or None)

    def _row(self, item: AgentSketch, *, has_sketch: bool) -> AgentRow:
        """Return an agent's row; after a list, changes are messages at its end."""
        if has_sketch:
            return AgentRow.of(item)
        kept = len(item.sketch) - NEW_PIECES
        return AgentRow.of(
            replace(item, sketch=item.sketch[kept:], kept=(kept, item.sketch[kept - 1]))
        )

    async def __call__(self, raw: bytes) -> bytes:
        """Answer one encoded call."""
        call, _ = decode_call(raw)
        if isinstance(call, DescribeChanges):
            has_all = not (call.view and call.links)
            links = LinkChanges(1, has_all, self.view.links if has_all else ())
            return encode_reply(self.history.changes(call, self.view, links))
        if isinstance(call, ListChanges):
            return encode_reply(self._list_changes(call.since))
        if isinstance(call, ShareErasures):
            return encode_reply(KnownErasures(()))
        if isinstance(call, PeerList):
            return encode_reply(Done())
        return encode_reply(ErrorReply(400, "unknown_call", "not answered here"))


def agent_of(node: NodeName, number: int, draw: random.Random) -> AgentSketch:
    """Return an agent that shares its head with all others."""
    view = AgentView(
        tenant=TENANT,
        agent=AgentId(f"{node}-{number}"),
        group=None,
        node=node,
        state=OwnerState.OWNED,
        epoch=1,
        revision=7,
        tokens=PIECES * PIECE_BYTES // 4,
        blocks=50,
        bytes=TierBytes(0, 400 << 20),
        tiers=("disk",),
        busy=False,
        created_s=1.7e9,
        used_s=1.7e9,
        last_match=LastMatch("extension", 12_000, 12_800, "continues the agent's memory"),
        durable=True,
        tail=f"{draw.getrandbits(64):016x}",
    )
    own = (draw.getrandbits(64) for _ in range(PIECES - HEAD_PIECES))
    return AgentSketch(view, (*range(1, HEAD_PIECES + 1), *own))


@dataclass(frozen=True, slots=True)
class BenchFleet:
    """Router and its nodes."""

    services: Services
    nodes: list[MemoryNode]
    clock: HeldClock


async def start_fleet(
    http: NodeHttp,
    nodes_count: int,
    agents_count: int,
    seed: int,
    settings: RouterSettings | None = None,
    *,
    http_url: str | None = None,
) -> BenchFleet:
    """Return a router that knows all nodes and all their agents; turns go to `http_url`."""
    draw = random.Random(f"{seed}:{nodes_count}")
    nodes = [MemoryNode(n, agents_count // nodes_count, draw) for n in range(nodes_count)]
    for number, node in enumerate(nodes):
        if http_url is not None:
            node.view = replace(node.view, http_url=http_url)
        near = [nodes[(number + step) % nodes_count] for step in range(1, min(17, nodes_count))]
        node.measure(near)

    async def roster() -> Mapping[NodeName, ControlTransport]:
        return {node.name: node for node in nodes}

    def connect(
        name: NodeName, transport: ControlTransport, is_lost: Callable[[], bool]
    ) -> NodeLink:
        return NodeLink(name, transport, http, "secret", is_lost, uses_http=False)

    clock = HeldClock()
    access = NodeAccess(roster, connect, clock)
    services = assemble(access, settings or RouterSettings(), _KEY)
    membership = services.fleet.membership
    await membership.discover()
    await asyncio.gather(*(membership.heartbeat(m, _NEVER) for m in membership.members))
    while names := membership.unreported_nodes():  # lists that timed out beside all the others
        members = [membership.find(name) for name in names[:LISTS_AT_ONCE]]
        await asyncio.gather(*(membership.heartbeat(m, _NEVER) for m in members if m))
    return BenchFleet(services, nodes, clock)


def turn_of(agent: AgentSketch | None, *, named: bool, draw: random.Random) -> TurnRequest:
    """Return the next turn of an agent, or the first turn of a new agent with the shared head."""
    if agent is not None:
        sketch: tuple[int, ...] = (*agent.sketch, draw.getrandbits(64), draw.getrandbits(64))
    else:
        own = (draw.getrandbits(64) for _ in range(PIECES - HEAD_PIECES))
        sketch = (*range(1, HEAD_PIECES + 1), *own)
    ends = tuple(PIECE_BYTES * (at + 1) for at in range(len(sketch)))
    prompt = Prompt(
        text="", sketch=sketch, sketch_ends=ends, opening=sketch[-1], bytes_count=ends[-1]
    )
    name = agent.view.agent if agent is not None else AgentId(f"new-{draw.getrandbits(32)}")
    identity = Identity(IdentityKind.AGENT, name) if named else Identity(IdentityKind.CONTENT)
    return TurnRequest(OperationId("op"), TENANT, MODEL, identity, Sampling(), prompt)


class StepTimes:
    """CPU time of each step of each task of an event loop, by the task's coroutine."""

    def __init__(self) -> None:
        self.steps_s: dict[str, list[float]] = {}

    def install(self) -> None:
        """Measure the tasks that are created from now on."""
        loop = asyncio.get_running_loop()

        def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
            name = getattr(work, "__qualname__", type(work).__name__)
            timed = _Timed(work, self.steps_s.setdefault(name, []))
            return asyncio.Task(timed, loop=loop, **options)

        loop.set_task_factory(make)


class _Timed(Coroutine[Any, Any, Any]):
    def __init__(self, work: Coroutine[Any, Any, Any], steps_s: list[float]) -> None:
        self._work = work
        self._steps_s = steps_s

    def send(self, value: Any) -> Any:
        began_s = time.thread_time()
        try:
            return self._work.send(value)
        finally:
            self._steps_s.append(time.thread_time() - began_s)

    def throw(self, *error: Any) -> Any:
        began_s = time.thread_time()
        try:
            return self._work.throw(*error)
        finally:
            self._steps_s.append(time.thread_time() - began_s)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._work.__await__())

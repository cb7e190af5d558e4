"""Real nodes and routers in one process that can be killed, as by SIGKILL, at any message.

When a node dies, its folder is copied as it is at that moment, and the node restarts from the copy
as a new process would. When a router dies, all its state is lost and its messages are not sent.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric.control.calls import decode_call, spec_of
from fabric.control.node_calls import AgentList, AgentView, ListAgents, NodeView
from fabric.ids import AgentId, NodeName
from fabric.keys import http_secret
from fabric.limits import HEARTBEAT_S
from fabric.record.manifest import OwnerState
from fabric.settings import RouterSettings
from fabric.turn.generation import Delta, Finished, Identity, IdentityKind, Sampling
from node.service import NodeService
from router.fleet.fleet import NodeAccess
from router.fleet.node_client import NodeLink, NodeLostError
from router.fleet.node_http import NodeHttp
from router.fresh_ids import fresh_operation
from router.prompt import chat_prompt
from router.services import Services, assemble
from router.turn_request import TurnRequest
from tests.support.clocks import ScaledClock
from tests.support.conversations import read_messages
from tests.support.incoming import pinned_blocks
from tests.support.services import KEY, TENANT, call, start_service

SCALE = 6.0  # of the router's clock by default: leases of a second
# Sent periodically: no step of a move.
WATCHING = ("describe", "describe_changes", "list_agents", "list_changes")
SETTLE_S = 30.0


@dataclass
class Mac:
    """A node: its present process, and the folder of this incarnation."""

    name: str
    folder: Path
    model: str
    service: NodeService | None = None
    lives: int = 0
    copied: threading.Event = field(default_factory=threading.Event)  # its death is certain

    async def start(self) -> None:
        root = self.folder / f"life-{self.lives}"
        self.copied.clear()
        self.service = await asyncio.to_thread(start_service, root, self.model, self.name)

    async def die(self) -> None:
        """Stop at once; later writes do not reach the next incarnation's disk."""
        dead, self.service = self.service, None
        assert dead is not None, "the node is already dead"
        old = self.folder / f"life-{self.lives}"
        self.lives += 1
        await asyncio.to_thread(_copy, old, self.folder / f"life-{self.lives}")
        self.copied.set()
        await asyncio.to_thread(dead.stop)

    @property
    def node(self) -> Any:
        assert self.service is not None, "the node is dead"
        return self.service.node


def _copy(old: Path, new: Path) -> None:
    """Copy a folder in use: records before blocks, so that no copied record lacks its blocks."""

    def records_first(path: str, names: list[str]) -> set[str]:
        return {name for name in names if name.startswith(".tmp-")}

    for part in sorted(old.rglob("manifests")):
        target = new / part.relative_to(old)
        shutil.copytree(part, target, ignore=records_first, copy_function=_keep_first)
    shutil.copytree(old, new, ignore=records_first, dirs_exist_ok=True, copy_function=_keep_first)


def _keep_first(source: str, target: str) -> None:
    if not Path(target).exists():
        with suppress(FileNotFoundError):  # removed after it was listed
            shutil.copy2(source, target)


@dataclass
class Message:
    """Control call in transit: its number among all steps, its name and its receiver."""

    index: int
    name: str
    to: str
    raw: bytes


Meddle = Callable[[Message, Callable[[], Awaitable[bytes]]], Awaitable[bytes]]


@dataclass
class World:
    """The Macs, the present router, and the hook that interferes with messages."""

    macs: dict[str, Mac]
    scale: float = SCALE
    services: Services | None = None
    meddle: Meddle | None = None
    requests_lost_to: set[str] = field(default_factory=set)  # control messages to them are lost
    replies_lost_from: set[str] = field(default_factory=set)  # their answers are lost
    sent: list[Message] = field(default_factory=list)
    _tending: asyncio.Task[None] | None = None
    _alive: list[bool] = field(default_factory=list)
    _session: Any = None

    @property
    def router(self) -> Services:
        assert self.services is not None, "there is no router"
        return self.services

    async def start_router(self) -> None:
        """Start a router without any state."""
        alive = [True]

        async def roster() -> dict[NodeName, Any]:
            return {NodeName(name): self._transport(name, alive) for name in self.macs}

        def connect(name: NodeName, transport: Any, is_lost: Callable[[], bool]) -> NodeLink:
            secret = http_secret(KEY)  # calls use the transport only, so that `meddle` sees them
            return NodeLink(name, transport, self._session, secret, is_lost, uses_http=False)

        access = NodeAccess(roster, connect, ScaledClock(self.scale), HEARTBEAT_S / self.scale)
        self.services = assemble(access, RouterSettings(takeover_after_s=0.3), KEY)
        self._alive = alive
        await self.services.fleet.membership.discover()
        await self.services.fleet.membership.refresh()
        self._tending = asyncio.create_task(self.services.run())

    async def kill_router(self) -> None:
        """Drop all further messages of the router, then stop it."""
        self._alive[0] = False
        dead, self.services = self._tending, None
        assert dead is not None, "there is no router"
        dead.cancel()
        await asyncio.gather(dead, return_exceptions=True)

    def _transport(self, name: str, alive: list[bool]) -> Callable[[bytes], Awaitable[bytes]]:
        async def carry(raw: bytes) -> bytes:
            service = self.macs[name].service
            if not alive[0] or service is None or name in self.requests_lost_to:
                message = f"{name} does not answer"
                raise NodeLostError(message, NodeName(name))
            reply = await asyncio.wrap_future(service.control(raw))
            if (
                not alive[0]
                or self.macs[name].service is not service
                or name in self.replies_lost_from
            ):
                message = f"the answer of {name} was lost"
                raise NodeLostError(message, NodeName(name))
            return reply

        async def send(raw: bytes) -> bytes:
            call, _ = decode_call(raw)
            what = spec_of(type(call)).name
            if what in WATCHING or not alive[0]:
                return await carry(raw)
            message = Message(len(self.sent), what, name, raw)
            self.sent.append(message)
            if self.meddle is None:
                return await carry(raw)
            return await self.meddle(message, lambda: carry(raw))

        return send

    # --- clients -----------------------------------------------------------------------------

    async def ask(
        self, agent: str, *texts: str, on_event: Callable[[], None] = lambda: None, **sampling: Any
    ) -> tuple[str, Any]:
        """Run one turn through the router; return the answer and the admission."""
        opened = await self.router.turns.open(self.turn(agent, *texts, **sampling))
        parts, is_finished = [], False
        async for event in opened.events():
            on_event()
            if isinstance(event, Delta):
                parts.append(event.text)
            is_finished = is_finished or isinstance(event, Finished)
        assert is_finished, "the turn ended without its last event"
        return "".join(parts), opened.admitted

    def turn(self, agent: str, *texts: str, **sampling: Any) -> TurnRequest:
        """Build a turn; the texts alternate between user and assistant."""
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        (model,) = self.router.fleet.models()
        return TurnRequest(
            operation=fresh_operation(),
            tenant=TENANT,
            model=model,
            identity=Identity(IdentityKind.AGENT, AgentId(agent)),
            sampling=Sampling(**{"max_tokens": 12, **sampling}),
            prompt=chat_prompt(read_messages(messages)),
        )

    # --- truth -------------------------------------------------------------------------------

    async def views(self, agent: str) -> dict[str, AgentView]:
        """Return every living node's own view of an agent."""
        found = {}
        for mac in self.macs.values():
            if mac.service is not None:
                listed = await asyncio.to_thread(call, mac.service, ListAgents(), AgentList)
                mine = [item.view for item in listed.agents if item.view.agent == agent]
                if mine:
                    found[mac.name] = mine[0]
        return found

    async def await_one_owner(self, agent: str, timeout_s: float = SETTLE_S) -> AgentView:
        """Wait until one node owns the agent at the highest epoch and nothing is undecided."""
        async with asyncio.timeout(timeout_s):
            while True:
                views = await self.views(agent)
                owned = [v for v in views.values() if v.state is OwnerState.OWNED]
                sealed = any(v.state is OwnerState.SEALED for v in views.values())
                highest = max((v.epoch for v in views.values()), default=0)
                if len(owned) == 1 and not sealed and owned[0].epoch == highest:
                    return owned[0]
                await asyncio.sleep(0.02)

    async def await_no_loose_blocks(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until every node's blocks are exactly those that its records name."""
        async with asyncio.timeout(timeout_s):
            while not all(map(_is_tidy, self.macs.values())):  # noqa: ASYNC110 - disks send no event
                await asyncio.sleep(0.05)

    async def alive(self) -> None:
        """Wait until every node is ready for the router."""
        fleet = self.router.fleet
        async with asyncio.timeout(SETTLE_S):
            while len(fleet.ready()) < len(self.macs) or not fleet.membership.is_settled():  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def await_current_lives(self) -> None:
        """Wait until the router has each node's present incarnation."""
        await self.alive()
        lives = {
            name: mac.node.resources.identity.config.incarnation for name, mac in self.macs.items()
        }

        def known_incarnations() -> dict[str, int]:
            members = self.router.fleet.membership.members
            views: list[NodeView | None] = [member.view for member in members]
            return {view.name: view.incarnation for view in views if view is not None}

        async with asyncio.timeout(SETTLE_S):
            while known_incarnations() != lives:  # noqa: ASYNC110 - heartbeats send no event
                await asyncio.sleep(0.02)


def _is_tidy(mac: Mac) -> bool:
    """Return whether a node's disk has exactly the blocks that its records name."""
    node = mac.node
    needed = {
        ref.name for agent in node.resources.table if agent.saved for ref in agent.saved.kept_refs
    }
    stored = {ref.name for ref in node.resources.store.blocks.sizes()}
    return needed == stored and not pinned_blocks(node)


@asynccontextmanager
async def mortal_fabric(
    folder: Path, model: str, *names: str, scale: float = SCALE
) -> AsyncIterator[World]:
    """Run nodes and a router for a block of code."""
    world = World({name: Mac(name, folder / name, model) for name in names}, scale)
    await asyncio.gather(*(mac.start() for mac in world.macs.values()))
    async with NodeHttp() as session:
        world._session = session
        await world.start_router()
        try:
            yield world
        finally:
            if world.services is not None:
                await world.kill_router()
            for mac in world.macs.values():
                if mac.service is not None:
                    await asyncio.to_thread(mac.service.stop)

"""Events of the fleet, and the bus that never waits for its followers.

    publish ──▶ kept: the last FLEET_EVENTS_MAX, for followers that reconnect with an event id
            └─▶ each subscription: as many, then none until its follower knows how many it missed

A subscription that falls behind drops its events at once and counts further ones: its follower
needs a new snapshot, which replaces all of them.

Events of the fleet. None contains text of a prompt or an answer.

An event with a `key` is visible to its agent's tenant; all others are visible to operators, and
`NodeChanged` to every tenant. Field names are those of docs/http-api.md.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import ClassVar, TypeAlias

from fabric.control.node_calls import PRESSURES
from fabric.errors import OverloadedError
from fabric.fair_share import FairShare
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, TenantId, TurnId
from fabric.net.links import LinkKind
from fabric.ports import Clock
from fabric.turn.generation import Admitted, TurnTimes
from router.fresh_ids import fresh_event_key
from router.limits import FLEET_EVENTS_MAX, FLEET_FOLLOWERS_MAX


@dataclass(frozen=True, slots=True)
class AgentEvent:
    """Event about one agent."""

    name: ClassVar[str]
    key: AgentKey


@dataclass(frozen=True, slots=True)
class AgentFound(AgentEvent):
    """Report of a joining node that it owns the agent."""

    name: ClassVar[str] = "agent.found"
    node: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentCreated(AgentEvent):
    """Creation of an agent by its first turn, a fork or a file."""

    name: ClassVar[str] = "agent.created"
    node: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentMoved(AgentEvent):
    """Change of the agent's owner by a move or a takeover."""

    name: ClassVar[str] = "agent.moved"
    source: NodeName
    target: NodeName
    epoch: int


@dataclass(frozen=True, slots=True)
class AgentForked(AgentEvent):
    """Fork of an agent with the context of another one."""

    name: ClassVar[str] = "agent.forked"
    forked_from: AgentId
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentHibernated(AgentEvent):
    """Export of the agent to a file; the agent stays."""

    name: ClassVar[str] = "agent.hibernated"
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentResumed(AgentEvent):
    """Import of the agent from a file."""

    name: ClassVar[str] = "agent.resumed"
    node: NodeName


@dataclass(frozen=True, slots=True)
class AgentErased(AgentEvent):
    """Erasure of the agent; no node serves it any more."""

    name: ClassVar[str] = "agent.erased"


@dataclass(frozen=True, slots=True)
class AgentEvicted(AgentEvent):
    """Removal of the agent from one node."""

    name: ClassVar[str] = "agent.evicted"
    node: NodeName
    replica: bool


@dataclass(frozen=True, slots=True)
class TurnBegan(AgentEvent):
    """Admission of a turn by a node."""

    name: ClassVar[str] = "turn.began"
    node: NodeName
    epoch: int
    cache: str
    prompt_tokens: int
    cached_tokens: int
    turn: TurnId | None = None
    match: str = ""
    reason: str = ""  # where and why the match ended, without text of the prompt

    @classmethod
    def of(cls, tenant: TenantId, admitted: Admitted, turn: TurnId | None) -> "TurnBegan":
        """Return the event of a node's admission."""
        return cls(
            (tenant, admitted.agent),
            admitted.node,
            admitted.epoch,
            admitted.cache,
            admitted.prompt_tokens,
            admitted.cached_tokens,
            turn,
            admitted.match,
            admitted.match_reason,
        )


@dataclass(frozen=True, slots=True)
class TurnEnded(AgentEvent):
    """End of a turn, with its outcome (ok, failed or cancelled) and its last node."""

    name: ClassVar[str] = "turn.ended"
    node: NodeName
    outcome: str
    completion_tokens: int
    seconds: float
    turn: TurnId | None = None
    times: TurnTimes | None = None  # None: its last node has not sent them


class MoveState(StrEnum):
    """Progress of a move."""

    COPYING = "copying"  # published again after every copied part
    SEALED = "sealed"
    COMMITTED = "committed"
    FAILED = "failed"  # and undone; `agent.moved` follows if the agent moved anyway


@dataclass(frozen=True, slots=True)
class MoveChanged(AgentEvent):
    """Progress of a move, and the bytes sent."""

    name: ClassVar[str] = "move.state"
    move: MigrationId
    source: NodeName
    target: NodeName
    state: MoveState
    blocks_sent: int = 0
    bytes_sent: int = 0
    bytes_total: int = 0  # of the agent on its source's disk; the target may have a part of them
    seconds: float = 0.0
    code: str | None = None  # why it failed


@dataclass(frozen=True, slots=True)
class NodeChanged:
    """Change of a node's state; `before` is None for a node that is new."""

    name: ClassVar[str] = "node.state"
    node: NodeName
    state: str  # as in GET /v1/nodes
    before: str | None


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """Memory pressure on a node's machine, and the budget of its agents' caches."""

    name: ClassVar[str] = "node.memory"
    node: NodeName
    pressure: str  # normal, warning or critical
    hot_limit_bytes: int
    hot_total_bytes: int

    @property
    def is_usual(self) -> bool:
        """Whether there is no pressure, and caches have their planned budget."""
        return self.pressure == PRESSURES[0] and self.hot_limit_bytes == self.hot_total_bytes


@dataclass(frozen=True, slots=True)
class DrainChanged:
    """Progress of a node's drain: draining, drained or stuck."""

    name: ClassVar[str] = "drain.state"
    node: NodeName
    state: str
    agents_moved: int
    agents_left: int
    bytes_sent: int


@dataclass(frozen=True, slots=True)
class LinkMeasured:
    """Rate of the best link of a kind from a peer to a node."""

    name: ClassVar[str] = "link.rate"
    node: NodeName
    peer: NodeName
    kind: LinkKind
    bytes_per_s: float
    rtt_s: float | None


FleetEvent: TypeAlias = AgentEvent | NodeChanged | MemoryChanged | DrainChanged | LinkMeasured


def concerns(event: FleetEvent, tenant: TenantId) -> bool:
    """Return whether a tenant may see an event; operators may see all."""
    if isinstance(event, AgentEvent):
        return event.key[0] == tenant
    return isinstance(event, NodeChanged)


Publish: TypeAlias = Callable[[FleetEvent], None]
_ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class Published:
    """Event with its wall-clock time and its number among all events."""

    number: int
    at_s: float
    event: FleetEvent


class Subscription:
    """Events still to be sent to one follower."""

    def __init__(self, owner: str, tenant: TenantId | None) -> None:
        """Follow the events of a tenant, or with None all events, for an operator."""
        self.owner = owner
        self.missed_count = 0
        self._closed = asyncio.Event()
        self._tenant = tenant
        self._waiting: deque[Published] = deque()
        self._news = asyncio.Event()

    def offer(self, published: Published) -> None:
        """Queue an event that the follower may see, or count it if the queue is full."""
        if self._tenant is not None and not concerns(published.event, self._tenant):
            return
        if self.missed_count == 0 and len(self._waiting) < FLEET_EVENTS_MAX:
            self._waiting.append(published)
        else:
            self.missed_count += 1 + len(self._waiting)
            self._waiting.clear()
        self._news.set()

    async def take(self) -> list[Published]:
        """Wait for events and return them; empty if some were missed or this was closed."""
        await self._news.wait()
        self._news.clear()
        events = list(self._waiting)
        self._waiting.clear()
        return events

    async def rest(self, seconds: float) -> None:
        """Wait for `seconds`, or until this is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closed.wait()

    def restart(self) -> int:
        """Receive events again from now on; return how many were missed."""
        missed_count, self.missed_count = self.missed_count, 0
        return missed_count

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self._closed.set()
        self._news.set()


class FleetEvents:
    """Events of the fleet, and the subscriptions to them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._count = 0
        self._kept: deque[Published] = deque(maxlen=FLEET_EVENTS_MAX)
        self._followers: set[Subscription] = set()
        self._slots = FairShare[str](FLEET_FOLLOWERS_MAX)
        self._key: bytes | None = None  # set by the first follower
        self._is_closed = False

    def publish(self, event: FleetEvent) -> None:
        """Send an event to all followers."""
        self._count += 1
        published = Published(self._count, self._clock.wall_s(), event)
        self._kept.append(published)
        for follower in self._followers:
            follower.offer(published)

    def past(self, tenant: TenantId | None) -> list[Published]:
        """List the kept events of a tenant, or with None all kept events, the oldest first."""
        return [e for e in self._kept if tenant is None or concerns(e.event, tenant)]

    def follow(
        self, owner: str, tenant: TenantId | None, after: str | None = None
    ) -> tuple[Subscription, bool]:
        """Subscribe from now on, or from after the event `after`; return whether that is known.

        Raises OverloadedError if there are too many followers.
        """
        if not self._slots.take(owner):
            message = "too many clients follow the fleet's events already"
            raise OverloadedError(message)
        subscription = Subscription(owner, tenant)
        self._followers.add(subscription)
        if self._is_closed:
            subscription.close()
        number = None if after is None else self._number_of(after)
        if number is None:
            return subscription, False
        for published in self._kept:
            if published.number > number:
                subscription.offer(published)
        return subscription, True

    def leave(self, subscription: Subscription) -> None:
        """Stop following; repeatable."""
        if subscription in self._followers:
            self._followers.discard(subscription)
            self._slots.give(subscription.owner)

    def close(self) -> None:
        """End all subscriptions, as the router stops."""
        self._is_closed = True
        for follower in self._followers:
            follower.close()

    @property
    def last_id(self) -> str:
        """Id of the last event."""
        return self.id_of(self._count)

    def id_of(self, number: int) -> str:
        """Return an event's id, which does not reveal how many events other tenants cause."""
        if self._key is None:
            self._key = fresh_event_key()
        raw = number.to_bytes(8, "big")
        return blake2b(raw, digest_size=_ID_BYTES, key=self._key).hexdigest()

    def _number_of(self, name: str) -> int | None:
        """Return an event's number, if all later events are still kept."""
        first = self._count - len(self._kept)
        return next((n for n in range(first, self._count + 1) if self.id_of(n) == name), None)

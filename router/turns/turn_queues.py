"""Queues of turns for nodes: bounded, fair between tenants, with a measured Retry-After.

    turn ──▶ place at its node? ── yes ──▶ sent; the place is free again once the node admits it
                    └ no ──▶ waits in the node's queue (FairQueue) ──▶ place
                                   └ no room for its tenant: another node, else 429, Retry-After

A node gets few turns at a time that it has not admitted. The rest waits here, where it costs the
node nothing: its event loop answers heartbeats. Interactive and background turns have places and
queues of their own, so that neither waits for the other here; the node puts interactive ones first.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from fabric.errors import OverloadedError
from fabric.fair_share import share_of
from fabric.ids import NodeName, TenantId
from fabric.limits import RETRY_AFTER_S_MIN, retry_wait_s
from fabric.ports import Clock
from fabric.turn.generation import Priority
from router.fair_queue import FairQueue
from router.fleet.node_client import NodeLostError
from router.limits import (
    BACKGROUND_QUEUE_SHARE,
    PACE_TURNS,
    SENT_BACKGROUND_TURNS_MAX,
    SENT_TURNS_MAX,
)
from router.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class QueueRules:
    """Bounds and weights of all queues, as the operator sets them."""

    waiting_max: int  # interactive turns of one node
    weights: Mapping[str, float]  # of tenants; others have 1

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight."""
        return self.weights.get(tenant, 1.0)


@dataclass(slots=True, eq=False)
class _Waiting:
    """Turn in a queue, or with a place."""

    tenant: TenantId
    work_s: float
    granted: asyncio.Future[None]  # the place; raises NodeLostError
    has_place: bool = False


class _Pace:
    """Pace of a queue: seconds of work admitted per second, measured while turns wait."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, float]] = deque(maxlen=PACE_TURNS)  # seconds, and work
        self._since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Note that turns wait from now on."""
        if self._since_s is None:
            self._since_s = now_s

    def note(self, work_s: float, now_s: float, *, others_wait: bool) -> None:
        """Note that a turn was admitted."""
        if self._since_s is not None:
            self._turns.append((now_s - self._since_s, work_s))
        self._since_s = now_s if others_wait else None

    @property
    def work_per_s(self) -> float:
        """One second of work per second, until something was measured."""
        seconds = sum(spent_s for spent_s, _ in self._turns)
        work_s = sum(work_s for _, work_s in self._turns)
        return work_s / seconds if seconds > 0 and work_s > 0 else 1.0


class _NodeQueue:
    """Places and queue of one node for turns of one priority."""

    def __init__(self, places_max: int, waiting_max: int, rules: QueueRules) -> None:
        self._rules = rules
        self._places_max = places_max
        self._waiting_max = waiting_max
        self._sent = Counter[str]()  # by tenant
        self._order = FairQueue[_Waiting](rules.weight)
        self._pace = _Pace()

    def __len__(self) -> int:
        return len(self._order)

    def put(self, waiting: _Waiting, now_s: float) -> bool:
        """Give a turn a place or let it wait; return False if its tenant's part is full."""
        tenant = waiting.tenant
        if not self._has_place(tenant):
            if not self._may_wait(tenant):
                return False
            self._pace.begin(now_s)
        self._order.put(tenant, waiting, waiting.work_s)
        self._fill()
        return True

    def leave(self, waiting: _Waiting, now_s: float, *, is_admitted: bool) -> None:
        """Free a turn's place, or remove it from the queue."""
        if waiting.has_place:
            waiting.has_place = False
            self._sent[waiting.tenant] -= 1
            if not self._sent[waiting.tenant]:
                del self._sent[waiting.tenant]
            if is_admitted:
                self._pace.note(waiting.work_s, now_s, others_wait=len(self._order) > 0)
        elif waiting in self._order:
            self._order.remove(waiting.tenant, waiting)
        self._fill()

    def give_up(self, error: Callable[[], Exception]) -> None:
        """End all waits with an error."""
        for tenant in self._order.tenants():
            for waiting in self._order.items(tenant):
                self._order.remove(tenant, waiting)
                if not waiting.granted.done():
                    waiting.granted.set_exception(error())

    def retry_after_s(self, tenant: str) -> float:
        """Return the seconds until half of a tenant's waiting work has left, at today's pace.

        If it has none, half of all. Waiting for the whole queue would be too late; waiting for its
        first place would bring all clients back at once.
        """
        tenants, own_s = self._order.tenants(), self._order.cost(tenant)
        if own_s > 0:
            weights = sum(map(self._rules.weight, tenants))
            own_s *= weights / self._rules.weight(tenant)
        else:
            own_s = sum(map(self._order.cost, tenants))
        wait_s = own_s / 2 / self._pace.work_per_s
        return retry_wait_s(wait_s)

    def is_full(self, tenant: str) -> bool:
        """Return whether one more turn of a tenant would be refused."""
        return not (self._has_place(tenant) or self._may_wait(tenant))

    def _may_wait(self, tenant: str) -> bool:
        """Return whether a tenant's part of the queue has room for one more turn."""
        waiting_count = self._order.count(tenant)
        others_count = len(self._order) - waiting_count
        return waiting_count < share_of(self._waiting_max - others_count)

    def _has_place(self, tenant: str) -> bool:
        """Return whether a tenant holds less than its part of the places.

        The tenants share the places by weight with one more that may come, so that it finds some,
        unless there are more tenants than places.
        """
        if self._sent.total() >= self._places_max:
            return False
        weight = self._rules.weight
        tenants = {tenant, *self._sent, *self._order.tenants()}
        part = weight(tenant) / (sum(map(weight, tenants)) + 1.0)
        return self._sent[tenant] < max(1, int(part * self._places_max))

    def _fill(self) -> None:
        """Give free places to the turns that are next."""
        while (waiting := self._order.next(self._has_place)) is not None:
            self._sent[waiting.tenant] += 1
            waiting.has_place = True
            if not waiting.granted.done():  # otherwise it is being cancelled, and leaves
                waiting.granted.set_result(None)


class Place:
    """A turn's place at its node, or in its queue."""

    def __init__(self, queue: _NodeQueue, waiting: _Waiting, clock: Clock) -> None:
        self._queue = queue
        self._waiting = waiting
        self._clock = clock
        self.had_to_wait = not waiting.has_place

    def leave(self, *, is_admitted: bool = False) -> None:
        """Leave the place to others; leaving twice is no error."""
        self._queue.leave(self._waiting, self._clock.monotonic_s(), is_admitted=is_admitted)


class TurnQueues:
    """Queues of all nodes; used on the router's event loop."""

    def __init__(self, rules: QueueRules, clock: Clock, telemetry: Telemetry) -> None:
        self._rules = rules
        self._clock = clock
        self._telemetry = telemetry
        self._queues: dict[tuple[NodeName, Priority], _NodeQueue] = {}

    async def enter(
        self, node: NodeName, tenant: TenantId, priority: Priority, work_s: float
    ) -> Place:
        """Return a turn's place at its node once it has one; the caller leaves it.

        Raise OverloadedError if the tenant's part of the queue is full, and NodeLostError if the
        node is lost while the turn waits.
        """
        queue = self._queue(node, priority)
        waiting = _Waiting(tenant, work_s, asyncio.get_running_loop().create_future())
        if not queue.put(waiting, self._clock.monotonic_s()):
            message = (
                f"{node} has no room for more of your {priority.value} requests: send fewer at "
                "once, or retry this one after Retry-After seconds"
            )
            raise OverloadedError(message, retry_after_s=queue.retry_after_s(tenant))
        place = Place(queue, waiting, self._clock)
        if place.had_to_wait:
            try:
                with self._telemetry.waiting(tenant):
                    await waiting.granted
            except BaseException:
                place.leave()
                raise
        return place

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight, which nodes apply as well."""
        return self._rules.weight(tenant)

    def waiting_count(self, node: NodeName) -> int:
        """Return the number of turns that wait for a place at a node."""
        return sum(len(self._queue(node, priority)) for priority in Priority)

    def full(self, tenant: str, priority: Priority) -> dict[NodeName, float]:
        """Return the nodes that have no room for a tenant's turn, and when each may have some."""
        return {
            node: queue.retry_after_s(tenant)
            for (node, served), queue in self._queues.items()
            if served is priority and len(queue) and queue.is_full(tenant)
        }

    def retry_after_s(self, tenant: str) -> float:
        """Return when a tenant with too many requests may send more, by its fullest queue."""
        waits_s = (queue.retry_after_s(tenant) for queue in self._queues.values() if len(queue))
        return max(waits_s, default=RETRY_AFTER_S_MIN)

    def sweep(self, is_up: Callable[[NodeName], bool]) -> None:
        """Release the turns that wait for lost nodes."""
        for (node, _), queue in self._queues.items():
            if len(queue) and not is_up(node):
                message = f"{node} was lost while a turn waited for a place there"
                queue.give_up(partial(NodeLostError, message, node))

    def _queue(self, node: NodeName, priority: Priority) -> _NodeQueue:
        queue = self._queues.get((node, priority))
        if queue is None:
            waiting_max = self._rules.waiting_max
            if priority is Priority.BACKGROUND:
                places_max = SENT_BACKGROUND_TURNS_MAX
                waiting_max = max(1, int(waiting_max * BACKGROUND_QUEUE_SHARE))
            else:
                places_max = SENT_TURNS_MAX
            queue = self._queues[node, priority] = _NodeQueue(places_max, waiting_max, self._rules)
        return queue

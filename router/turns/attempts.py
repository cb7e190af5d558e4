"""Attempts to run one turn on nodes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from fabric.control.calls import ErrorReply
from fabric.errors import FabricError, OverloadedError
from fabric.ids import NodeName, Traceparent
from fabric.ports import Clock
from fabric.turn.generation import Admitted, Event, Failed, TurnTag
from router.fleet.fleet import Fleet
from router.fleet.node_client import remote_error
from router.limits import COMING_FACTOR, COMING_S_MIN
from router.placement.decision import Decision
from router.placement.load_ledger import Booking
from router.turn_request import TurnRequest
from router.turns.owner_wait import AwaitedNodes
from router.turns.targets import Target


@dataclass(frozen=True, slots=True)
class AdmittedTurn:
    """Turn on one node: its admission, its further events, and a call that ends its booking."""

    first: Admitted
    source: AsyncGenerator[Event, None]
    entry: Booking
    end: Callable[[], None]
    decision: Decision | None = None  # that chose the node


class StaleTargetError(Exception):
    """The turn's agent has moved while the turn waited for a place."""


@dataclass(slots=True)
class Attempt:
    """Attempts of one turn so far."""

    started_s: float
    waiting: AwaitedNodes
    goes_first: bool = False  # the client has read a part of the answer already
    lost_since_s: float | None = None
    has_moved: bool = False  # the decision to move its agent is not repeated
    move: Decision | None = None  # the decision to move its agent
    has_refreshed: bool = False
    has_waited: bool = False  # queued at a node that its agent has left since
    given_up: set[NodeName] = field(default_factory=set)
    full: dict[NodeName, float] = field(default_factory=dict)  # nodes, and when each has room [s]
    moved_s: float = 0.0  # time spent waiting for the move

    def tag(
        self, turn: TurnRequest, clock: Clock, trace: Traceparent | None = None
    ) -> TurnTag | None:
        """Name the turn for its node, with the time that it has waited here, and its span."""
        if turn.id is None:
            return None
        waited_s = clock.monotonic_s() - self.started_s
        queue_s = max(0.0, waited_s - self.moved_s)
        began_s = clock.wall_s() - waited_s
        return TurnTag(turn.id, began_s, queue_s, self.moved_s, trace)

    def decision_of(self, node: NodeName, decision: Decision | None) -> Decision | None:
        """Return the decision that led to a node: the move before it, if that was made."""
        return self.move if self.move is not None and self.move.node == node else decision

    def waits_for_place(self, turn: TurnRequest) -> bool:
        """Return whether the turn queues for its node; no client waits twice for one answer."""
        return not (self.has_waited or self.goes_first or turn.was_admitted or turn.resume)

    def note_full(
        self, node: NodeName, error: OverloadedError, others: Mapping[NodeName, float]
    ) -> None:
        """Note nodes without room, so that another one is chosen; raise the error if none is."""
        if node in self.full:  # it was chosen again: the turn's agent cannot leave it now
            raise error
        self.full |= {**others, node: error.retry_after_s}
        self.has_moved = False  # each of the few further moves goes to a node that has room

    def refusal(self) -> OverloadedError:
        """Return the error of a turn for which no node has room, with the soonest delay."""
        message = (
            "no node has room for more of your requests: send fewer at once, or retry this one "
            "after Retry-After seconds"
        )
        return OverloadedError(message, retry_after_s=min(self.full.values()))


def admission_of(event: Event, node: NodeName) -> Admitted:
    """Return a turn's first event as its admission; raise FabricError if it is another event."""
    if isinstance(event, Failed):
        raise remote_error(ErrorReply(event.status, event.code, event.message))
    if not isinstance(event, Admitted) or event.node != node:
        message = f"{node} did not start its answer with an admission"
        raise FabricError(message, code="bad_event")
    return event


def give_up_unless(patience: asyncio.Timeout, handover: asyncio.Task[bool]) -> None:
    """End a wait for an agent's new node if its move has failed."""
    if not handover.cancelled() and not handover.result():
        with suppress(RuntimeError):  # it has just started
            patience.reschedule(asyncio.get_running_loop().time())


@contextmanager
def announce_prompt(
    fleet: Fleet, turn: TurnRequest, target: Target, *, is_private: bool
) -> Iterator[None]:
    """Let other turns find a prompt's beginning on the node that is about to compute it."""
    if is_private or not turn.is_kept:
        yield
        return
    tenant, node = turn.tenant, target.node
    borrows = target.head is not None
    name = fleet.sketches.put_coming(tenant, node, turn.prompt.sketch, borrows=borrows)
    limit_s = max(COMING_S_MIN, COMING_FACTOR * fleet.ledger.prefill_s(node))
    remove = partial(fleet.sketches.remove, tenant, node, name)
    expiry = asyncio.get_running_loop().call_later(limit_s, remove)
    try:
        yield
    finally:
        expiry.cancel()
        remove()

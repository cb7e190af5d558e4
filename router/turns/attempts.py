"""Tries of one turn on nodes, and what comes of them."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from fabric.ids import NodeName
from fabric.turn.generation import Admitted, Event
from router.placement.decision import Decision, MoveAgent
from router.placement.load_ledger import Booking
from router.turn_request import TurnRequest
from router.turns.owner_wait import AwaitedNodes


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
    move: MoveAgent | None = None  # that decision
    has_refreshed: bool = False
    has_waited: bool = False  # for a place at a node that its agent has left since
    given_up: set[NodeName] = field(default_factory=set)

    def waits_for_place(self, turn: TurnRequest) -> bool:
        """Return whether the turn queues for its node; no client waits twice for one answer."""
        return not (self.has_waited or self.goes_first or turn.was_admitted or turn.resume)

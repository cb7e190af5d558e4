"""Which node a turn is sent to, and at which epoch: asked here alone.

    owner known, lease alive ──▶ the owner; above any epoch given to another meanwhile
    owner silent             ──▶ the owner until the turn gives it up, then another at epoch + 1
    owner starting again     ──▶ the same
    owner expired            ──▶ another at epoch + 1
    owner stepped down       ──▶ the same, above the epoch that its undecided move may have made
    nobody owns it           ──▶ the cheapest in seconds; the same for all its first turns

Nothing is awaited between the look at the fleet and what is noted of the decision.
"""

import logging
from dataclasses import dataclass

from fabric.ids import AgentKey, NodeName
from router.fleet import snapshots
from router.fleet.directory import StartReservation
from router.fleet.fleet import Fleet
from router.placement.decision import Load, Recompute, Stay
from router.placement.placement import Placement, recompute_s
from router.telemetry import Telemetry
from router.turn_request import TurnRequest

_LOG = logging.getLogger("macfabric.router.turns")


@dataclass(frozen=True, slots=True)
class Target:
    """Node that a turn goes to next; `waits` if that node's KV cache is worth waiting for."""

    node: NodeName
    epoch: int
    waits: bool
    prefill_s: float = 0.0
    cold: bool = False
    reservation: StartReservation | None = None


class Targets:
    """Turns decisions into targets, and keeps agents that are begun from others."""

    def __init__(self, fleet: Fleet, placement: Placement, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._placement = placement
        self._telemetry = telemetry

    def choose(self, turn: TurnRequest, given_up: frozenset[NodeName]) -> Target:
        """Return where a turn goes next; raise RetryLaterError if no node can take it."""
        near = turn.near
        if turn.key is None and near and near not in given_up and self._fleet.is_up(near):
            return Target(near, epoch=0, waits=True)
        facts = snapshots.facts_of(turn, given_up)
        decision = self._placement.decide(facts, snapshots.of_turn(self._fleet, turn))
        if turn.key is None:
            return _unnamed(decision)
        if isinstance(decision, Stay):
            return self._staying(turn.key, decision.node)
        return self._begun(turn.key, decision)

    def recompute_s(self, turn: TurnRequest, without: NodeName) -> float:
        """Estimate what the prompt costs on another node."""
        facts = snapshots.facts_of(turn, frozenset({without}))
        return recompute_s(facts, snapshots.of_turn(self._fleet, turn))

    def _staying(self, key: AgentKey, node: NodeName) -> Target:
        """Go to the owner; above an epoch of another node that may come back and fence its turn.

        It was given one that never came of it, or it may own the agent and was not heard yet.
        """
        directory = self._fleet.directory
        started, owner = directory.starting(key), directory.owner(key)
        if started is not None and started.node == node:
            return Target(node, started.epoch, waits=True, reservation=started)
        is_latest = not self._fleet.may_have_later_owner(key)
        highest = max(directory.issued(key), directory.highest(key))
        if owner and highest <= owner.epoch and is_latest:
            return Target(node, owner.epoch, waits=True)
        epoch = self._fleet.begin_epoch(key)
        return Target(node, epoch, waits=True, reservation=directory.reserve(key, node, epoch))

    def _begun(self, key: AgentKey, decision: Load | Recompute) -> Target:
        """Reserve a node for an agent that no reachable node owns."""
        directory, node = self._fleet.directory, decision.node
        owner = directory.owner(key)
        if owner is not None:
            self._telemetry.taken_over()
            alias = self._fleet.alias(key)
            _LOG.warning("agent %s: %s takes over from %s", alias, node, owner.node)
        epoch = self._fleet.begin_epoch(key)
        reservation = directory.reserve(key, node, epoch)
        is_cold = isinstance(decision, Recompute)
        return Target(node, epoch, False, decision.prefill_s, is_cold, reservation)


def _unnamed(decision: Stay | Load | Recompute) -> Target:
    # Which agent it will be is found out by the node, so there is no epoch to tell.
    if isinstance(decision, Stay):
        return Target(decision.node, epoch=0, waits=True)
    is_cold = isinstance(decision, Recompute)
    return Target(decision.node, 0, not is_cold, decision.prefill_s, is_cold)

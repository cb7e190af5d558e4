"""Target of a turn: its node and epoch. The only place that chooses them.

    owner known, lease alive ──▶ the owner, or the node to which it is moved first; at an
                                 epoch above any given to another meanwhile
    owner silent             ──▶ the owner until the turn gives it up, then another at epoch + 1
    owner starting again     ──▶ the same
    owner expired            ──▶ another at epoch + 1
    owner released it        ──▶ the same, above the epoch of the undecided move
    no owner                 ──▶ the cheapest in seconds; the same node for all its first turns

Nothing is awaited between the snapshot of the fleet and the record of the decision.
"""

import logging
from dataclasses import dataclass, replace

from fabric.ids import AgentKey, NodeName
from fabric.turn.generation import HeadLoan
from router.fleet import snapshots
from router.fleet.directory import StartReservation
from router.fleet.fleet import Fleet
from router.placement.decision import Decision, Load, MoveAgent, Recompute, Stay
from router.placement.head_lenders import head_loan, with_loan
from router.placement.placement import Placement, recompute_s
from router.telemetry import Telemetry
from router.turn_request import TurnRequest

_LOG = logging.getLogger("macfabric.router.turns")


@dataclass(frozen=True, slots=True)
class Target:
    """Node to which a turn is sent; `waits` if its KV cache is worth waiting for."""

    node: NodeName
    epoch: int
    waits: bool
    prefill_s: float = 0.0
    cold: bool = False
    move: MoveAgent | None = None  # to be made first; then the target is chosen again
    head: HeadLoan | None = None  # that the node may take a part of the prompt from
    reservation: StartReservation | None = None
    decision: Decision | None = None  # from which it follows


class Targets:
    """Targets by the placement's decisions, with reservations for agents that start."""

    def __init__(
        self, fleet: Fleet, placement: Placement, telemetry: Telemetry, *, moves_agents: bool
    ) -> None:
        """Choose by `placement`; with `moves_agents`, it may move idle agents."""
        self._fleet = fleet
        self._placement = placement
        self._telemetry = telemetry
        self._moves_agents = moves_agents

    def choose(
        self, turn: TurnRequest, given_up: frozenset[NodeName], *, may_move: bool = False
    ) -> Target:
        """Return a turn's next target; raise RetryLaterError if no node can take it.

        With `may_move`, it may be a node to which the idle agent must be moved first.
        """
        near = turn.near
        if turn.key is None and near and near not in given_up and self._fleet.is_up(near):
            return Target(near, epoch=0, waits=True)
        facts = snapshots.facts_of(turn, given_up)
        fleet = snapshots.of_turn(
            self._fleet,
            turn,
            given_up,
            is_whole=self._placement.compares_all,
            may_move=may_move and self._moves_agents,
        )
        decision = self._placement.decide(facts, fleet)
        if isinstance(decision, MoveAgent) or turn.resume is not None:
            return replace(self._target_of(turn, decision), decision=decision)
        chosen = head_loan(facts, fleet, decision.node)
        if chosen is None:
            return replace(self._target_of(turn, decision), decision=decision)
        decision = with_loan(decision, chosen)
        self._fleet.partners.note(chosen.loan.source, decision.node)
        return replace(self._target_of(turn, decision), decision=decision, head=chosen.loan)

    def _target_of(self, turn: TurnRequest, decision: Decision) -> Target:
        if isinstance(decision, MoveAgent):
            return Target(decision.node, 0, True, decision.prefill_s, move=decision)
        if turn.key is None:
            return _target_by_content(decision)
        if isinstance(decision, Stay):
            target = self._target_at_owner(turn.key, decision.node)
            return replace(target, prefill_s=decision.prefill_s)
        return self._target_of_start(turn.key, decision)

    def recompute_s(self, turn: TurnRequest, without: NodeName) -> float:
        """Estimate the prefill of the prompt on another node."""
        given_up = frozenset({without})
        fleet = snapshots.of_turn(self._fleet, turn, given_up)
        return recompute_s(snapshots.facts_of(turn, given_up), fleet)

    def _target_at_owner(self, key: AgentKey, node: NodeName) -> Target:
        """Return the owner, at an epoch above those of other nodes that could fence its turn.

        Such a node was given an epoch that it never used, or has not reported yet and may own
        the agent.
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

    def _target_of_start(self, key: AgentKey, decision: Load | Recompute) -> Target:
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
        return Target(node, epoch, False, decision.prefill_s, is_cold, reservation=reservation)


def _target_by_content(decision: Stay | Load | Recompute) -> Target:
    # The node finds the agent by content, so the epoch is unknown here.
    if isinstance(decision, Stay):
        return Target(decision.node, 0, True, decision.prefill_s)
    is_cold = isinstance(decision, Recompute)
    return Target(decision.node, 0, not is_cold, decision.prefill_s, is_cold)

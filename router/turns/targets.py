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
from dataclasses import dataclass

from fabric.hosting.otel_spans import Attribute
from fabric.ids import AgentKey, NodeName
from fabric.turn.generation import HeadLoan
from router.fleet import snapshots
from router.fleet.directory import StartReservation
from router.fleet.fleet import Fleet
from router.placement.decision import Decision, How
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
    decision: Decision | None = None  # from which it follows
    reservation: StartReservation | None = None

    @property
    def prefill_s(self) -> float:
        """Expected seconds of prefill on the node."""
        return self.decision.terms.prefill_s if self.decision is not None else 0.0

    @property
    def is_cold(self) -> bool:
        """Whether the node has nothing of the prompt stored itself."""
        return self.decision is not None and self.decision.is_cold

    @property
    def move(self) -> Decision | None:
        """Move to be made first; then the target is chosen again."""
        is_move = self.decision is not None and self.decision.how is How.MOVE
        return self.decision if is_move else None

    @property
    def head(self) -> HeadLoan | None:
        """Loan of which the node may take a part of the prompt."""
        return self.decision.loan if self.decision is not None else None

    def facts(self) -> dict[str, Attribute]:
        """Return the attributes of the decision's span."""
        decision = self.decision
        if decision is None:
            return {"node": self.node}
        return {
            "node": self.node,
            "how": decision.how.value,
            "queue_estimate_s": decision.terms.queue_s,
            "load_estimate_s": decision.terms.load_s,
            "prefill_estimate_s": decision.terms.prefill_s,
            "first_token_estimate_s": decision.terms.first_token_s,
        }


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
        self,
        turn: TurnRequest,
        given_up: frozenset[NodeName],
        full: frozenset[NodeName] = frozenset(),
        *,
        may_move: bool = False,
    ) -> Target:
        """Return a turn's next target; raise RetryLaterError if no node can take it.

        It is never a `full` node, except for an agent that cannot leave it now. With `may_move`, it
        may be a node to which the idle agent must be moved first.
        """
        near = turn.near
        if turn.key is None and near and near not in given_up | full and self._fleet.is_up(near):
            return Target(near, epoch=0, waits=True)
        decision = self.decide(turn, given_up, full, may_move=may_move)
        if decision.loan is not None:
            self._fleet.partners.note(decision.loan.source, decision.node)
        return self._target_of(turn.key, decision)

    def decide(
        self,
        turn: TurnRequest,
        given_up: frozenset[NodeName] = frozenset(),
        full: frozenset[NodeName] = frozenset(),
        *,
        may_move: bool = False,
    ) -> Decision:
        """Return the placement's decision on a turn as the fleet is now, without acting on it."""
        began_s = self._fleet.clock.monotonic_s()
        facts = snapshots.facts_of(turn, given_up, full)
        whole = self._placement.compares_all
        fleet = snapshots.of_turn(self._fleet, turn, given_up, full, is_whole=whole)
        decision = self._placement.decide(facts, fleet)
        if may_move and self._moves_agents and self._placement.weighs_moves(facts, decision):
            fleet = snapshots.with_move_targets(self._fleet, turn, fleet)
            decision = self._placement.decide(facts, fleet) if fleet.is_idle else decision
        self._telemetry.note_placement(self._fleet.clock.monotonic_s() - began_s)
        return decision

    def _target_of(self, key: AgentKey | None, decision: Decision) -> Target:
        """Return a decision's node with the turn's epoch there, reserved where it needs to be."""
        node = decision.node
        if key is None or decision.how is How.MOVE:
            # The node finds an unnamed agent by content, so its epoch is unknown here.
            return Target(node, epoch=0, waits=not decision.is_cold, decision=decision)
        if decision.how is How.STAY:
            return self._target_at_owner(key, decision)
        return self._target_of_start(key, decision)

    def recompute_s(self, turn: TurnRequest, without: NodeName) -> float:
        """Estimate the prefill of the prompt on another node."""
        given_up = frozenset({without})
        fleet = snapshots.of_turn(self._fleet, turn, given_up)
        return recompute_s(snapshots.facts_of(turn, given_up), fleet)

    def _target_at_owner(self, key: AgentKey, decision: Decision) -> Target:
        """Return the owner, at an epoch above those of other nodes that could fence its turn.

        Such a node was given an epoch that it never used, or has not reported yet and may own
        the agent.
        """
        node, directory = decision.node, self._fleet.directory
        started, owner = directory.start_reservation(key), directory.owner(key)
        if started is not None and started.node == node:
            return Target(node, started.epoch, waits=True, decision=decision, reservation=started)
        is_latest = not self._fleet.may_have_later_owner(key)
        highest = max(directory.issued_epoch(key), directory.highest(key))
        if owner and highest <= owner.epoch and is_latest:
            return Target(node, owner.epoch, waits=True, decision=decision)
        epoch = self._fleet.begin_epoch(key)
        reserved = directory.reserve(key, node, epoch)
        return Target(node, epoch, waits=True, decision=decision, reservation=reserved)

    def _target_of_start(self, key: AgentKey, decision: Decision) -> Target:
        """Reserve a node for an agent that no reachable node owns."""
        node, directory = decision.node, self._fleet.directory
        owner = directory.owner(key)
        if owner is not None:
            self._telemetry.takeovers.inc()
            alias = self._fleet.alias(key)
            _LOG.warning("agent %s: %s takes over from %s", alias, node, owner.node)
        epoch = self._fleet.begin_epoch(key)
        reserved = directory.reserve(key, node, epoch)
        return Target(node, epoch, waits=False, decision=decision, reservation=reserved)

"""Turns that are expected next: their agents are loaded while the current turn decodes.

The order of a group never decides what is reused: a wrong guess costs a load, and no more.
Nothing is loaded while turns wait for the node of the agent.
"""

from functools import partial

from fabric.ids import AgentId, TenantId
from fabric.turn.generation import IdentityKind
from router.fleet.directory import Directory
from router.moves.prefetches import PrefetchRequests
from router.telemetry import Telemetry
from router.turn_request import TurnRequest
from router.turns.turn_order import GroupKey, TurnOrders
from router.turns.turn_queues import TurnQueues


class ExpectedTurns:
    """Guesses by the learnt order of turns."""

    def __init__(
        self,
        directory: Directory,
        prefetches: PrefetchRequests,
        queues: TurnQueues,
        telemetry: Telemetry,
    ) -> None:
        self._directory = directory
        self._prefetches = prefetches
        self._queues = queues
        self._telemetry = telemetry
        self._orders = TurnOrders()

    def note(self, turn: TurnRequest, agent: AgentId) -> None:
        """Note a turn that a node has admitted."""
        if turn.is_kept:
            was_right = self._orders.note(self._group(turn, agent), agent)
            if was_right is not None:
                self._telemetry.guesses.labels("right" if was_right else "wrong").inc()

    def prepare(self, turn: TurnRequest, agent: AgentId) -> None:
        """Load the agent whose turn is expected next, as this one begins to decode."""
        group = self._group(turn, agent)
        following = self._orders.expect(group, agent) if turn.is_kept else None
        if following is None:
            return
        owner = self._directory.owner((turn.tenant, following))
        if owner is None or self._queues.waiting_count(owner.node):
            self._telemetry.guesses.labels("refused").inc()
            return
        note = partial(self._orders.note_guess, group, following)
        self._prefetches.guess((turn.tenant, following), note)

    def _group(self, turn: TurnRequest, agent: AgentId) -> GroupKey:
        """Return the group of a turn: its session, the agent's group, or all that have none."""
        tenant: TenantId = turn.tenant
        if turn.session is not None:
            return tenant, turn.session
        if turn.identity.kind is IdentityKind.GROUP and turn.identity.agent is not None:
            return tenant, turn.identity.agent
        owner = self._directory.owner((tenant, agent))
        return tenant, (owner.group if owner is not None else None) or ""

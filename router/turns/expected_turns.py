"""Turns that are expected next, by the learnt order of a group's turns.

Agents that people run take turns: round robin, a parent after its child, a critic after a writer.
An order that was seen twice in a row is expected to hold, until it does not. Several turns of one
agent in a row (a tool loop) are one.

Sub-agents are new agents each time, so none of them has a follower yet: a parent that came back
after two new agents in a row is expected after the next one that follows it.

The agent of an expected turn is loaded while the current turn decodes, unless turns wait for its
node. The order never decides what is reused: a wrong guess costs a load, and no more.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial

from fabric.ids import AgentId, TenantId
from fabric.turn.generation import IdentityKind
from router.fleet.directory import Directory
from router.limits import TURN_ORDER_AGENTS_MAX, TURN_ORDER_SEEN_MIN, TURN_ORDERS_MAX
from router.moves.prefetches import PrefetchRequests
from router.telemetry import Telemetry
from router.turn_request import TurnRequest
from router.turns.turn_queues import TurnQueues

GroupKey = tuple[TenantId, str]


@dataclass(slots=True)
class _Follower:
    agent: AgentId
    seen_count: int = 1  # in a row


@dataclass(slots=True)
class _Order:
    last: AgentId | None = None
    guess: AgentId | None = None  # agent that was loaded for the next turn
    parent: AgentId | None = None  # agent before the last one, if the last one is new
    returning: _Follower | None = None  # parent that came back after new agents
    after: OrderedDict[AgentId, _Follower] = field(default_factory=OrderedDict)


class TurnOrders:
    """Orders of the groups with recent turns; the oldest group and agent are forgotten."""

    def __init__(self) -> None:
        self._orders: OrderedDict[GroupKey, _Order] = OrderedDict()

    def note(self, group: GroupKey, agent: AgentId) -> bool | None:
        """Note a turn; return whether a guess about it was right, or None if there was none."""
        order = self._orders.setdefault(group, _Order())
        self._orders.move_to_end(group)
        if len(self._orders) > TURN_ORDERS_MAX:
            self._orders.popitem(last=False)
        before, guess = order.last, order.guess
        if before == agent:
            return None
        order.last, order.guess = agent, None
        is_new = agent not in order.after
        _learn_return(order, agent)
        order.parent = before if is_new else None
        if before is not None:
            _learn(order, before, agent)
        return None if guess is None else guess == agent

    def expect(self, group: GroupKey, agent: AgentId) -> AgentId | None:
        """Return the agent whose turn is expected after that of `agent`, the last; or None."""
        order = self._orders.get(group)
        if order is None or order.last != agent:
            return None
        follower = order.after.get(agent)
        if follower is None and order.returning and order.returning.agent == order.parent:
            follower = order.returning
        if follower is None or follower.seen_count < TURN_ORDER_SEEN_MIN:
            return None
        return follower.agent

    def note_guess(self, group: GroupKey, agent: AgentId) -> None:
        """Note that an agent was loaded for the group's next turn."""
        if group in self._orders:
            self._orders[group].guess = agent


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


def _learn_return(order: _Order, agent: AgentId) -> None:
    """Learn from the agent after a new one whether parents come back."""
    if order.parent is None:
        return
    if agent != order.parent:
        order.returning = None
    elif order.returning is not None and order.returning.agent == agent:
        order.returning.seen_count += 1
    else:
        order.returning = _Follower(agent)


def _learn(order: _Order, before: AgentId, agent: AgentId) -> None:
    follower = order.after.get(before)
    if follower is not None and follower.agent == agent:
        follower.seen_count += 1
    else:
        order.after[before] = _Follower(agent)
    order.after.move_to_end(before)
    if len(order.after) > TURN_ORDER_AGENTS_MAX:
        order.after.popitem(last=False)

"""Recent activity in this router: turns and moves of agents, nodes of sessions, fetches of nodes.

It guides placement and the measurement of links, and never decides what is reused: content alone
does. The router remembers it in memory only, and forgets the oldest.
"""

from collections import Counter, OrderedDict
from typing import TypeVar

from fabric.ids import AgentId, AgentKey, NodeName, TenantId
from fabric.ports import Clock
from router.limits import (
    COOLING_AGENTS_MAX,
    FIXED_AGENTS_MAX,
    MOVE_COOLDOWN_S,
    MOVE_PRICE_MAX,
    MOVE_PRICE_STEP,
    MOVES_PER_TURN,
    PARTNERS_MAX,
    SESSIONS_MAX,
)

K = TypeVar("K")
V = TypeVar("V")


class AgentActivity:
    """Running turns, agents that placement has moved recently, and those that clients placed.

    An agent that a client has moved stays where it is until its node drains or is lost.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turns: Counter[AgentKey] = Counter()
        self._moved_s: OrderedDict[AgentKey, float] = OrderedDict()
        self._held: OrderedDict[AgentKey, NodeName] = OrderedDict()
        self.move_price = 1.0  # factor on the price of a move

    def begin_turn(self, key: AgentKey) -> None:
        """Count a turn that a node has admitted."""
        self._turns[key] += 1
        self.move_price = max(1.0, self.move_price / (1 + MOVES_PER_TURN * MOVE_PRICE_STEP))

    def end_turn(self, key: AgentKey) -> None:
        """Remove a turn that has ended."""
        self._turns[key] -= 1
        if self._turns[key] <= 0:
            del self._turns[key]

    def is_idle(self, key: AgentKey) -> bool:
        """Return whether no turn of the agent runs."""
        return key not in self._turns

    def hold(self, key: AgentKey, node: NodeName) -> None:
        """Keep an agent on the node that a client has chosen."""
        _put_last(self._held, key, node, FIXED_AGENTS_MAX)

    def is_held(self, key: AgentKey, node: NodeName) -> bool:
        """Return whether a client has chosen this node for the agent."""
        return self._held.get(key) == node

    def forget(self, key: AgentKey) -> None:
        """Forget an agent that was erased."""
        self._held.pop(key, None)
        self._moved_s.pop(key, None)

    def note_move(self, key: AgentKey) -> None:
        """Let an agent rest after a move that placement decided."""
        _put_last(self._moved_s, key, self._clock.monotonic_s(), COOLING_AGENTS_MAX)
        self.move_price = min(MOVE_PRICE_MAX, self.move_price * (1 + MOVE_PRICE_STEP))

    def moved_lately(self, key: AgentKey) -> bool:
        """Return whether an agent still rests after a move."""
        moved_s = self._moved_s.get(key)
        return moved_s is not None and self._clock.monotonic_s() - moved_s < MOVE_COOLDOWN_S


class Sessions:
    """Node of the last turn of each session and sub-agent, by the names that coding agents send.

    A hint: among nodes that cost the same, a conversation without a known beginning starts where
    its sub-agent had its last turn, or else its session.
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[tuple[TenantId, AgentId], NodeName] = OrderedDict()

    def note(self, tenant: TenantId, node: NodeName, *names: AgentId | None) -> None:
        """Note a turn that a node has admitted, of sessions and sub-agents that have names."""
        for name in names:
            if name is not None:
                _put_last(self._nodes, (tenant, name), node, SESSIONS_MAX)

    def nodes(self, tenant: TenantId, *names: AgentId | None) -> tuple[NodeName, ...]:
        """Return the nodes of their last turns that are known, in the order of the names."""
        nodes = (self._nodes.get((tenant, name)) for name in names if name is not None)
        return tuple(dict.fromkeys(node for node in nodes if node is not None))


class RecentPartners:
    """Nodes from which each node fetched recently, the newest last: their links are measured."""

    def __init__(self) -> None:
        self._sources: dict[NodeName, OrderedDict[NodeName, None]] = {}
        self.changed: set[NodeName] = set()  # targets with changed sources, for the peer exchange

    def note(self, source: NodeName, target: NodeName) -> None:
        """Note that `target` is about to fetch from `source`."""
        if source == target:
            return
        sources = self._sources.setdefault(target, OrderedDict())
        if source not in sources:
            self.changed.add(target)
        _put_last(sources, source, None, PARTNERS_MAX)

    def of(self, target: NodeName) -> tuple[NodeName, ...]:
        """Return the sources of a target."""
        return tuple(self._sources.get(target, ()))


def _put_last(table: OrderedDict[K, V], key: K, value: V, items_max: int) -> None:
    """Store a value as the newest one; drop the oldest of too many."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > items_max:
        table.popitem(last=False)

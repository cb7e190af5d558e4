"""Activity of agents in this router: their running turns, and what placement may move.

An agent that a client has moved stays where it is until its node drains or is lost. The router
remembers this in memory only.
"""

from collections import Counter, OrderedDict
from typing import TypeVar

from fabric.ids import AgentKey, NodeName
from fabric.ports import Clock
from router.limits import (
    COOLING_AGENTS_MAX,
    FIXED_AGENTS_MAX,
    MOVE_COOLDOWN_S,
    MOVE_PRICE_MAX,
    MOVE_PRICE_STEP,
    MOVES_PER_TURN,
)

T = TypeVar("T")


class AgentActivity:
    """Running turns, agents that placement has moved recently, and those that clients placed."""

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


def _put_last(table: OrderedDict[AgentKey, T], key: AgentKey, value: T, agents_max: int) -> None:
    """Store a value as the newest one; drop the oldest of too many."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > agents_max:
        table.popitem(last=False)

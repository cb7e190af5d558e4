"""A fabric's present state, from a snapshot, the events since and polls of its rows."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from router.client.http_api import ServerEvent
from router.limits import TOP_AGENTS_MAX, TOP_EVENTS_MAX, TOP_MOVES_MAX, TOP_TURNS_MAX

Row: TypeAlias = dict[str, Any]
AgentName: TypeAlias = tuple[str | None, str]  # tenant, for operators, and id

SNAPSHOT: Final = "snapshot"
_ENDED_MOVES: Final = frozenset({"committed", "failed"})
_LOGGED_APART: Final = frozenset({SNAPSHOT, "missed"})


def agent_name(row: Mapping[str, Any]) -> AgentName:
    """Return the name of the agent that a row or an event is about."""
    return row.get("tenant"), str(row.get("id"))


@dataclass(slots=True)
class FleetState:
    """State of a fabric as far as it is known; every part is bounded."""

    health: str = "unknown"
    nodes: dict[str, Row] = field(default_factory=dict)
    agents: dict[AgentName, Row] = field(default_factory=dict)
    agents_left_out: int = 0
    moves: dict[str, Row] = field(default_factory=dict)
    turns: dict[AgentName, Row] = field(default_factory=dict)  # the last of each agent
    events: deque[ServerEvent] = field(default_factory=lambda: deque(maxlen=TOP_EVENTS_MAX))
    stale: set[AgentName] = field(default_factory=set)  # rows that events have outdated
    _first_token_s: dict[str, deque[float]] = field(default_factory=dict)

    def take(self, event: ServerEvent) -> None:
        """Take a snapshot, or one change."""
        if event.name == SNAPSHOT:
            self._take_snapshot(event.data)
            return
        if event.name not in _LOGGED_APART:
            self.events.append(event)
        change = _CHANGES.get(event.name)
        if change is not None:
            change(self, event.data)

    def take_nodes(self, rows: Iterable[Row]) -> None:
        """Take rows of GET /v1/nodes."""
        self.nodes = {str(row.get("name")): row for row in rows}

    def take_agent(self, name: AgentName, row: Row | None) -> None:
        """Update an agent from its row; None removes it."""
        self.stale.discard(name)
        if row is None:
            self.agents.pop(name, None)
            self.turns.pop(name, None)
        elif name in self.agents:
            self.agents[name] |= row

    def take_turn(self, name: AgentName, turn: Row | None) -> None:
        """Add an agent's last turn from its history; None if that is empty."""
        if name in self.turns:
            return  # an event was faster
        self.turns[name] = turn or {}
        if turn:
            self._note_first_token(turn)

    def last_used(self, count: int) -> list[AgentName]:
        """Return the agents used last, the last one first."""
        return sorted(self.agents, key=self._used_s, reverse=True)[:count]

    def first_token_s(self, node: str) -> float | None:
        """Return the median time to the first token of a node's last turns."""
        times = self._first_token_s.get(node)
        return median(times) if times else None

    def _used_s(self, name: AgentName) -> float:
        used_s = self.agents[name].get("used_s")
        return float(used_s) if isinstance(used_s, int | float) else 0.0

    def _take_snapshot(self, data: Row) -> None:
        self.health = str((data.get("health") or {}).get("status", "unknown"))
        self.take_nodes(data.get("nodes") or [])
        self.agents = {agent_name(row): row for row in data.get("agents") or []}
        self.agents_left_out = data.get("agents_left_out") or 0
        self.moves = {str(row.get("move")): row for row in data.get("moves") or []}
        self.turns = {name: turn for name, turn in self.turns.items() if name in self.agents}
        self.stale.clear()

    def _note_first_token(self, turn: Row) -> None:
        first_s = (turn.get("times") or {}).get("first_token_s")
        if isinstance(first_s, int | float):
            node = str(turn.get("node"))
            times = self._first_token_s.setdefault(node, deque(maxlen=TOP_TURNS_MAX))
            times.append(float(first_s))

    def _change_agent(self, data: Row, **changes: Any) -> None:
        name = agent_name(data)
        self.agents[name] = {**self.agents.get(name, {"id": data.get("id")}), **changes}
        self.stale.add(name)
        if len(self.agents) > TOP_AGENTS_MAX:
            least = min(self.agents, key=self._used_s)
            self.take_agent(least, None)
            self.agents_left_out += 1

    def _place_agent(self, data: Row) -> None:
        self._change_agent(data, owner=data.get("node"), used_s=data.get("at_s"))

    def _move_agent(self, data: Row) -> None:
        self._change_agent(data, owner=data.get("to"))

    def _evict_agent(self, data: Row) -> None:
        if agent_name(data) in self.agents:
            self.stale.add(agent_name(data))  # a copy, or all of it

    def _erase_agent(self, data: Row) -> None:
        self.take_agent(agent_name(data), None)

    def _begin_turn(self, data: Row) -> None:
        self._change_agent(data, owner=data.get("node"), used_s=data.get("at_s"), busy=True)
        self.turns[agent_name(data)] = dict(data)

    def _end_turn(self, data: Row) -> None:
        name = agent_name(data)
        self._change_agent(data, used_s=data.get("at_s"), busy=False)
        self.turns[name] = {**self.turns.get(name, {}), **data}
        self._note_first_token(data)

    def _change_move(self, data: Row) -> None:
        move = str(data.get("move"))
        self.moves.pop(move, None)
        if data.get("state") not in _ENDED_MOVES:
            self.moves[move] = data
        while len(self.moves) > TOP_MOVES_MAX:
            del self.moves[next(iter(self.moves))]

    def _change_node(self, data: Row) -> None:
        name = str(data.get("node"))
        self.nodes[name] = {**self.nodes.get(name, {"name": name}), "state": data.get("state")}

    def _change_memory(self, data: Row) -> None:
        node = self.nodes.get(str(data.get("node")))
        if node is not None:
            node["memory"] = {**(node.get("memory") or {}), **data}


_CHANGES: Final[Mapping[str, Callable[[FleetState, Row], None]]] = MappingProxyType(
    {
        "agent.created": FleetState._place_agent,  # noqa: SLF001 - of this file
        "agent.found": FleetState._place_agent,  # noqa: SLF001
        "agent.forked": FleetState._place_agent,  # noqa: SLF001
        "agent.resumed": FleetState._place_agent,  # noqa: SLF001
        "agent.moved": FleetState._move_agent,  # noqa: SLF001
        "agent.evicted": FleetState._evict_agent,  # noqa: SLF001
        "agent.erased": FleetState._erase_agent,  # noqa: SLF001
        "turn.began": FleetState._begin_turn,  # noqa: SLF001
        "turn.ended": FleetState._end_turn,  # noqa: SLF001
        "move.state": FleetState._change_move,  # noqa: SLF001
        "node.state": FleetState._change_node,  # noqa: SLF001
        "node.memory": FleetState._change_memory,  # noqa: SLF001
    }
)

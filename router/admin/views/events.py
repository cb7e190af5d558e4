"""JSON views of the fleet's events, and the snapshot with which an event stream starts."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, fields
from heapq import nlargest
from typing import Any

from fabric.ids import AgentKey, TenantId
from fabric.turn.generation import TurnTimes
from router.admin.views.agents import agent_row
from router.admin.views.nodes import health_row, node_rows
from router.admin.views.shape import Row
from router.admin.views.turns import times_row
from router.events import FleetEvent, Published
from router.fleet.fleet import Fleet
from router.http.forwarded import Principal
from router.limits import FLEET_SNAPSHOT_AGENTS_MAX
from router.moves.drains import Drains
from router.moves.move_registry import MoveRegistry

AGENTS_AT_ONCE = 50  # rendered before other tasks run: a millisecond's work
_NAMES = {"source": "from", "target": "to"}


def event_row(published: Published, caller: Principal) -> Row:
    """Return an event and its time as a JSON row."""
    return {"at_s": round(published.at_s, 3)} | _plain(published.event, caller)


def _plain(event: FleetEvent, caller: Principal) -> Row:
    row: Row = {}
    for field in fields(event):
        value: Any = getattr(event, field.name)
        if field.name == "key":
            row |= _agent_name(value, caller)
        else:
            shown = times_row(value) if isinstance(value, TurnTimes) else value
            row[_NAMES.get(field.name, field.name)] = shown
    return row


def _agent_name(key: AgentKey, caller: Principal) -> Row:
    """Name an agent; for operators, who see all tenants, with its tenant."""
    return {"id": key[1]} if caller.operator is None else {"tenant": key[0], "id": key[1]}


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Snapshots of the fleet, as much as a caller may see."""

    fleet: Fleet
    drains: Drains
    moves: MoveRegistry

    async def show(self, caller: Principal, tenant: TenantId | None = None) -> Row:
        """Show health, nodes, moves and the most recently used agents, or those of one tenant.

        Other tasks run meanwhile; their events follow the snapshot.
        """
        known = self.fleet.directory.all_keys()
        keys = [key for key in known if _sees(caller, key) and tenant in (None, key[0])]
        used: list[tuple[float, AgentKey]] = []
        async for part in _in_parts(keys):
            used += ((self._used_s(key), key) for key in part)
        shown = [key for _, key in nlargest(FLEET_SNAPSHOT_AGENTS_MAX, used)]
        moves = self.moves.progress()
        agents: list[Row] = []
        row: Row = {
            "caller": {"tenant": caller.tenant, "operator": caller.operator is not None},
            "health": health_row(self.fleet, caller),
            "nodes": node_rows(self.fleet, self.drains, caller),
            "moves": [
                _plain(move, caller)
                for move in moves
                if _sees(caller, move.key) and tenant in (None, move.key[0])
            ],
            "agents": agents,
            "agents_left_out": len(keys) - len(shown),
        }
        async for part in _in_parts(shown):
            agents += (
                agent_row(self.fleet, key) | _agent_name(key, caller)
                for key in part
                if self.fleet.directory.holdings(key)  # still
            )
        return row

    def _used_s(self, key: AgentKey) -> float:
        holdings = self.fleet.directory.holdings(key)
        views = (holding.view for holding in holdings)
        return max((view.used_s for view in views if view), default=0.0)


async def _in_parts(keys: Sequence[AgentKey]) -> AsyncIterator[Sequence[AgentKey]]:
    """Yield parts of the keys, letting other tasks run after each."""
    for begin in range(0, len(keys), AGENTS_AT_ONCE):
        yield keys[begin : begin + AGENTS_AT_ONCE]
        await asyncio.sleep(0)


def _sees(caller: Principal, key: AgentKey) -> bool:
    return caller.operator is not None or key[0] == caller.tenant

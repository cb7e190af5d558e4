"""Maintenance of the stored roster: the nodes that the next router waits for.

    a node reports its agents                            it is stored
    it is drained, and empty                             it stays stored, but is not awaited
    the configuration does not name it                   it is removed
    it missed the time to join, and as many nodes as
    configured are there                                 it is removed: renamed or given away
    others reported NODE_REMEMBERED_S later than it      it is removed

Times are compared with each other, not with the clock: a fabric that was off for a month expects
all of its nodes.
"""

import asyncio
from dataclasses import replace

from fabric.control.node_calls import DRAINING
from fabric.ids import NodeName
from fabric.limits import NODES_MAX
from router.fleet.fleet import Fleet
from router.fleet.membership import Member
from router.fleet.node_roster import NodeRoster, RosterStore, SeenNode
from router.limits import NODE_REMEMBERED_S

ROSTER_RENEW_S = 3_600.0  # maximum age of the times in the stored roster
ROSTER_NODES_PER_ROUND = 128  # for each of which the roster is compared less often


class RosterKeeper:
    """Roster of the last router, updated by what this router sees."""

    def __init__(self, fleet: Fleet, store: RosterStore | None, stored: NodeRoster) -> None:
        """Expect the nodes of the `stored` roster; without a `store`, none is written."""
        self._fleet = fleet
        self._store = store
        self._stored = stored
        expected = fleet.discovery.expected
        if not expected.names:
            expected.is_fewer = 0 < expected.count < self._stored.configured
        pruned = _prune_roster(self._stored)
        is_whole = len(pruned.nodes) == len(self._stored.nodes) > 0
        is_configured = bool(expected.names or expected.count)
        expected.may_be_incomplete = store is not None and not (is_configured or is_whole)
        self._expect(pruned)

    async def run(self) -> None:
        """Store every change until cancelled."""
        while True:
            await self.round()
            members = len(self._fleet.membership.members)
            rest = max(1, members // ROSTER_NODES_PER_ROUND)  # a long roster changes seldom
            await asyncio.sleep(rest * self._fleet.membership.heartbeat_s)

    async def round(self) -> None:
        """Store the roster if it has changed since it was stored."""
        if self._store is None:
            return
        roster = self._current()
        if _differ(roster, self._stored) and await self._store.write(roster):
            self._stored = roster

    def _current(self) -> NodeRoster:
        expected = self._fleet.discovery.expected
        seen = {node.name: node for node in self._stored.nodes}
        newest_s = max((node.seen_s for node in seen.values()), default=0)
        now_s = max(int(self._fleet.clock.wall_s()), newest_s)  # in case the clock was set back
        present = [m for m in self._fleet.membership.members if self._is_present(m)]
        for member in present:
            seen[member.name] = SeenNode(member.name, now_s, self._is_drained(member))
        configured = max(expected.count, self._stored.configured)
        if expected.names:
            configured = len(expected.names)
            seen = {name: node for name, node in seen.items() if name in expected.names}
        elif expected.count and len(present) >= expected.count and self._is_late():
            configured, expected.is_fewer = expected.count, False
            names = {member.name for member in present}
            seen = {name: node for name, node in seen.items() if name in names or node.is_drained}
        nodes = tuple(seen[name] for name in sorted(seen))
        roster = _prune_roster(NodeRoster(configured, nodes, self._fleet.life))
        self._expect(roster)
        return roster

    def _expect(self, roster: NodeRoster) -> None:
        """Expect the nodes of a roster, unless the configuration names all nodes."""
        expected = self._fleet.discovery.expected
        if not expected.names:
            expected.remembered = tuple(n.name for n in roster.nodes if not n.is_drained)
            expected.drained = tuple(n.name for n in roster.nodes if n.is_drained)

    def _is_late(self) -> bool:
        return not self._fleet.discovery.has_time_to_gather()

    def _is_present(self, member: Member) -> bool:
        return member.listed is not None and self._fleet.is_up(member.name)

    def _is_drained(self, member: Member) -> bool:
        is_draining = member.view is not None and member.view.state == DRAINING
        return is_draining and not self._fleet.directory.agents_of_node(member.name)


def _prune_roster(roster: NodeRoster) -> NodeRoster:
    """Leave out nodes that others outlived by far, and the oldest of too many."""
    newest_s = max((node.seen_s for node in roster.nodes), default=0)
    recent = [node for node in roster.nodes if newest_s - node.seen_s <= NODE_REMEMBERED_S]
    recent = sorted(recent, key=lambda node: node.seen_s)[-NODES_MAX:]
    return replace(roster, nodes=tuple(sorted(recent, key=lambda node: node.name)))


def _differ(roster: NodeRoster, stored: NodeRoster) -> bool:
    """Return whether a roster should be written: it has other nodes, or much later times."""
    return _shape(roster) != _shape(stored) or any(
        abs(node.seen_s - old.seen_s) >= ROSTER_RENEW_S
        for node, old in zip(roster.nodes, stored.nodes, strict=True)
    )


def _shape(roster: NodeRoster) -> tuple[int, int, tuple[tuple[NodeName, bool], ...]]:
    names = tuple((node.name, node.is_drained) for node in roster.nodes)
    return roster.lives, roster.configured, names

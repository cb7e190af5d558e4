"""Judge of memory in use: caches exceed a node's budget by at most one of them."""

import weakref

from tests.sim.rows import Growth


class Memory:
    """All caches of one run's nodes: idle, in use, or being loaded."""

    def __init__(self, world):
        self._world = world
        self._growths = 0
        self._refused = weakref.WeakSet()

    def note_refused(self, table):
        """Record the caches that a disk has refused, which a turn may continue with."""
        for agent in table:
            if agent.is_unsaved:
                self._refused.add(agent.cache)
            elif agent.cache is not None:
                self._refused.discard(agent.cache)

    def check_step(self):
        """Compare the size of all referenced caches of each node with its budget.

        One cache may exceed it, since a turn must run even if no idle cache can be dropped. Caches
        that a disk has refused do not count.
        """
        if Growth.count == self._growths:
            return
        self._growths = Growth.count
        for host in self._world.nodes.values():
            if host.node is None:
                continue
            sizes = [cache.resident_bytes for cache in host.caches - self._refused]
            limit_bytes = host.node.resources.identity.settings.hot_bytes
            excess_bytes = sum(sizes) - max(sizes, default=0) - limit_bytes
            if excess_bytes > 0:
                self._world.fail(f"{host.name} holds {excess_bytes} bytes beyond its budget")

"""Judge of memory in use: caches exceed a node's budget by at most one of them."""

import weakref

from tests.sim.rows import Growth


class Memory:
    """The caches of one run's nodes: idle, at work, and on their way in, for whatever reason."""

    def __init__(self, world):
        self._world = world
        self._growths = 0
        self._refused = weakref.WeakSet()

    def note_refused(self, table):
        """Note whose memory is nowhere else, as a disk has refused it; a turn may go on with it."""
        for agent in table:
            if agent.is_unsaved:
                self._refused.add(agent.cache)
            elif agent.cache is not None:
                self._refused.discard(agent.cache)

    def check_step(self):
        """Add up all caches of a node's engine that are still referenced.

        One may be beside the budget: where nothing that is idle can be dropped, one must run
        all the same. What a disk has refused stays whatever the budget.
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

"""Nodes from which each node fetched recently, whose links are worth measuring."""

from collections import OrderedDict

from fabric.ids import NodeName
from router.limits import PARTNERS_MAX


class RecentPartners:
    """Last sources of each target, the newest last."""

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
        sources[source] = None
        sources.move_to_end(source)
        if len(sources) > PARTNERS_MAX:
            sources.popitem(last=False)

    def of(self, target: NodeName) -> tuple[NodeName, ...]:
        """Return the sources of a target."""
        return tuple(self._sources.get(target, ()))

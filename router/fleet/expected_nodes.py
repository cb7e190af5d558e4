"""Nodes that a fabric is expected to have, and those that have not joined yet.

`macfabric up` names its nodes. `macfabric serve` knows how many Macs its file lists, and the nodes
of its last router (`router/fleet/roster_keeper.py`). The router imports this module before it
listens, so it imports little.
"""

from collections.abc import Collection
from dataclasses import dataclass

from fabric.ids import NodeName


@dataclass(frozen=True, slots=True)
class MissingNodes:
    """Expected nodes that are not on Ray's list."""

    names: tuple[NodeName, ...] = ()
    unnamed_count: int = 0

    @property
    def count(self) -> int:
        return len(self.names) + self.unnamed_count

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the nodes, and how many have no known name."""
        more = self.unnamed_count
        unnamed = f"{more} {'node' if more == 1 else 'nodes'} without a known name"
        return (*self.names, *([unnamed] if more else []))

    def __str__(self) -> str:
        return ", ".join(self.labels)


@dataclass(slots=True)
class ExpectedNodes:
    """Nodes of the configuration, by name or number, and of the stored roster."""

    count: int = 0  # 0: not configured
    names: tuple[NodeName, ...] = ()  # complete, if any
    remembered: tuple[NodeName, ...] = ()  # nodes of the stored roster that may have agents
    drained: tuple[NodeName, ...] = ()  # nodes of the stored roster that have none
    is_fewer: bool = False  # `count` was reduced: unknown ones of `remembered` were removed
    may_be_incomplete: bool = False  # the number of nodes is unknown

    @property
    def total(self) -> int:
        if self.is_fewer:
            return self.count
        return len(self.names) or max(self.count, len(self.remembered))

    def missing(self, present: Collection[NodeName]) -> MissingNodes:
        """Return the expected nodes that are not in `present`."""
        if self.names:
            return MissingNodes(_absent(self.names, present))
        absent = _absent(self.remembered, present)
        if self.is_fewer:
            count = max(0, self.count - len(present))
            named = absent if len(absent) <= count else ()
            return MissingNodes(named, count - len(named))
        counted = {*present, *self.remembered, *self.drained}
        return MissingNodes(absent, max(0, self.count - len(counted)))


def _absent(names: Collection[NodeName], present: Collection[NodeName]) -> tuple[NodeName, ...]:
    return tuple(name for name in names if name not in present)

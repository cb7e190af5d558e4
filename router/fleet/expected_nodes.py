"""Which nodes this fabric has, and which of them have not joined yet.

`macfabric up` names its nodes. `macfabric serve` knows how many Macs its file has, and which nodes
its last router heard (`router/fleet/roster_keeper.py`).
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
        """The nodes' names, and how many more there are."""
        more = self.unnamed_count
        unnamed = f"{more} {'node' if more == 1 else 'nodes'} without a known name"
        return (*self.names, *([unnamed] if more else []))

    def __str__(self) -> str:
        return ", ".join(self.labels)


@dataclass(slots=True)
class ExpectedNodes:
    """The nodes of the configuration, by name or by number, and those of the stored roster."""

    count: int = 0  # 0: the configuration does not say
    names: tuple[NodeName, ...] = ()  # these are all
    remembered: tuple[NodeName, ...] = ()  # nodes of the stored roster that may have agents
    drained: tuple[NodeName, ...] = ()  # nodes of the stored roster that have none
    is_fewer: bool = False  # `count` fell: some of `remembered` were removed, unknown which
    may_be_incomplete: bool = False  # nothing says how many nodes there are

    @property
    def total(self) -> int:
        if self.is_fewer:
            return self.count
        return len(self.names) or max(self.count, len(self.remembered))

    def missing(self, present: Collection[NodeName]) -> MissingNodes:
        """Return which expected nodes are not among `present`."""
        if self.names:
            return MissingNodes(_absent(self.names, present))
        late = _absent(self.remembered, present)
        if self.is_fewer:
            count = max(0, self.count - len(present))
            named = late if len(late) <= count else ()
            return MissingNodes(named, count - len(named))
        known = {*present, *self.remembered, *self.drained}
        return MissingNodes(late, max(0, self.count - len(known)))


def _absent(names: Collection[NodeName], present: Collection[NodeName]) -> tuple[NodeName, ...]:
    return tuple(name for name in names if name not in present)

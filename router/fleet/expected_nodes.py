"""Which nodes this fabric has by its configuration, and which of them have not joined yet.

`macfabric up` names its nodes; `macfabric serve` knows how many Macs its file has.
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

    def __str__(self) -> str:
        more = self.unnamed_count
        unnamed = f"{more} {'node' if more == 1 else 'nodes'} without a known name"
        return ", ".join([*self.names, *([unnamed] if more else [])])


@dataclass(slots=True)
class ExpectedNodes:
    """The nodes of the configuration: by name, or by number alone."""

    count: int = 0  # 0: the configuration does not say
    names: tuple[NodeName, ...] = ()

    @property
    def total(self) -> int:
        return len(self.names) or self.count

    def missing(self, present: Collection[NodeName]) -> MissingNodes:
        """Return which expected nodes are not among `present`."""
        if self.names:
            return MissingNodes(tuple(name for name in self.names if name not in present))
        return MissingNodes((), max(0, self.count - len(present)))

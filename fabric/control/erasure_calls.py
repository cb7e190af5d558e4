"""Control messages for erasures: what goes, what a node says of it, and what all are told."""

from dataclasses import dataclass

from fabric.control.agent_at import AgentAt
from fabric.ids import NodeName, OperationId
from fabric.record.tombstone import Tombstone


@dataclass(frozen=True, slots=True)
class EraseAgent(AgentAt):
    """Remove every byte of an agent up to `epoch`; a repeat is answered like the first call.

    A tombstone stays: whoever holds an older record is told to remove it, too.
    """

    operation: OperationId
    erased_s: float  # of the tombstone


@dataclass(frozen=True, slots=True)
class RemovedElsewhere:
    """Counts of what an erasure removed from folders of models that are not served now."""

    records: int = 0
    blocks: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class EraseReceipt:
    """Counts of what an erasure removed on one node."""

    node: NodeName
    existed: bool
    blocks_removed: int = 0
    bytes_removed: int = 0
    blocks_kept_shared: int = 0  # another agent of the same tenant refers to them, or a reader
    bytes_kept_shared: int = 0
    record_removed: bool = False  # text, tokens and the list of blocks
    quarantined_removed: bool = False  # a record that had failed a check
    other_models: RemovedElsewhere = RemovedElsewhere()
    derived_agents: int = 0  # others that had borrowed of it: what came of that went, too
    derived_tokens: int = 0  # of their memory; it is computed anew
    tombstone: Tombstone | None = None  # on disk from now on; none: in memory, and tried again


@dataclass(frozen=True, slots=True)
class ShareErasures:
    """Tell a node what was erased, before it serves: it removes what it still has of it."""

    erased: tuple[Tombstone, ...]


@dataclass(frozen=True, slots=True)
class KnownErasures:
    """All tombstones of a node, those just told included."""

    erased: tuple[Tombstone, ...]
    agents_removed: int = 0

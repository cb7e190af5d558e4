"""Control messages for erasures: requests, receipts and the exchange of tombstones."""

from dataclasses import dataclass

from fabric.control.agent_at import AgentAt
from fabric.ids import NodeName, OperationId
from fabric.record.tombstone import Tombstone


@dataclass(frozen=True, slots=True)
class EraseAgent(AgentAt):
    """Request to remove every byte of an agent up to `epoch`; a repeat gets the same reply.

    A tombstone stays, so that nodes with an older record remove it, too.
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
    blocks_kept_shared: int = 0  # in use by another agent of the tenant, or by a reader
    bytes_kept_shared: int = 0
    record_removed: bool = False  # text, tokens and the list of blocks
    quarantined_removed: bool = False  # a record that had failed a check
    other_models: RemovedElsewhere = RemovedElsewhere()
    derived_agents: int = 0  # agents that had reused its prefix: that part was removed, too
    derived_tokens: int = 0  # of their memory, to be recomputed
    tombstone: Tombstone | None = None  # as stored; None: in memory only, and written later


@dataclass(frozen=True, slots=True)
class ShareErasures:
    """Request to remove all that these tombstones name, sent before a node serves."""

    erased: tuple[Tombstone, ...]


@dataclass(frozen=True, slots=True)
class KnownErasures:
    """All tombstones of a node, including those it just received."""

    erased: tuple[Tombstone, ...]
    agents_removed: int = 0

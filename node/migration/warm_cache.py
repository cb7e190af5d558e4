"""One agent's cache as far as it is here, while the agent still runs elsewhere."""

import threading
from dataclasses import dataclass, field

from fabric.record.manifest import Manifest
from fabric.record.piece_table import PieceTable
from node.engine.memory_budget import Reservation
from node.mlx.resident_cache import ResidentCache
from node.runtime.one_loop import of_one_loop


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class WarmCache:
    """The part of a moving agent's cache that is already in memory.

    While it is read into, its memory is reserved and may not be dropped; `cancel` ends that
    after the block that is being read.
    """

    reservation: Reservation
    cache: ResidentCache | None = None
    room_tokens: int = 0
    full: PieceTable = field(default_factory=PieceTable)  # in it, and changed by no later token
    tokens_count: int = 0  # once all of the final record is in it
    kept_as: int = 0  # the count of caches kept so far: the lowest is the oldest
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def size_bytes(self) -> int:
        """Memory held."""
        return self.cache.size_bytes if self.cache is not None else 0

    def begins(self, record: Manifest) -> bool:
        """Say whether its blocks are the first of the record's."""
        return record.pieces.tokens_in_common(self.full) == self.full.tokens_count

"""Reference to one stored block: its name, length and checksum."""

from dataclasses import dataclass

from fabric.ids import BlockHash, Checksum
from fabric.kvcache.cache_spec import CacheGroup


@dataclass(frozen=True, slots=True)
class BlockRef:
    """Reference to immutable bytes: two blocks are the same only if hash and checksum are.

    The hash identifies the tokens and all before them; the checksum the bits. Two Macs may
    compute one block with different rounding, and an agent must get back its own bits.
    """

    block_hash: BlockHash
    checksum: Checksum
    tokens_count: int
    payload_bytes: int
    group: CacheGroup = CacheGroup.FULL

    def __hash__(self) -> int:
        """Hash the bits' checksum only; refs are hashed thousands of times in every turn."""
        return hash(self.checksum)

    @property
    def name(self) -> str:
        """File name stem: hex digests only, so no outside text reaches a path."""
        return f"{self.block_hash.hex()}-{self.checksum.hex()}"

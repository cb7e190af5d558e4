"""Work of a fetch: blocks to fetch, and the ranges of them that streams take.

All streams take from one list, so a faster link carries more. A range belongs to one stream at
a time: nothing else writes to its bytes.
"""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Lock

from fabric.errors import CorruptDataError, RejectedError
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.hashing import PayloadHash
from fabric.limits import BLOCK_BYTES_MAX, TICKET_BLOCKS_MAX
from node.limits import TRANSFER_WRONG_MAX

Allocate = Callable[[BlockRef], memoryview]
Done = Callable[[BlockRef, memoryview], None]


class PendingBlock:
    """A block being fetched: its buffer and its missing bytes."""

    def __init__(self, ref: BlockRef) -> None:
        self.ref = ref
        self.missing_bytes = ref.payload_bytes
        self.wrong_count = 0
        self.was_cut = False
        self._view: memoryview | None = None
        self._hash = PayloadHash()
        self._allocating = Lock()

    def place(self, allocate: Allocate) -> memoryview:
        """Return the buffer, which `allocate` provides at the first call."""
        with self._allocating:
            if self._view is None:
                view = allocate(self.ref).cast("B")
                assert len(view) == self.ref.payload_bytes, "allocate gives the payload's length"
                self._view = view
            return self._view

    def hash_ahead(self, offset: int, length: int) -> None:
        """Hash bytes that arrived in order while they are still in the processor's cache.

        Called before they are counted as received, so never concurrently with `check`; and as no
        two streams hold the same range, only one can be at the position of the hash.
        """
        assert self._view is not None, "received bytes have a buffer"
        if offset == self._hash.hashed_bytes:
            self._hash.update(self._view[offset : offset + length])

    def start_over(self) -> None:
        """Discard all received bytes."""
        self.missing_bytes, self._hash = self.ref.payload_bytes, PayloadHash()

    def check(self) -> memoryview:
        """Return the complete bytes; raise CorruptDataError for a wrong checksum."""
        assert self.missing_bytes == 0, "checked when all bytes are there"
        assert self._view is not None, "complete blocks have a buffer"
        view = self._view
        self._hash.update(view[self._hash.hashed_bytes :])
        if self._hash.checksum() != self.ref.checksum:
            message = f"block {self.ref.name} arrived with a wrong checksum"
            raise CorruptDataError(message)
        self._view = None
        return view


class FetchSlice:
    """A range of a block that one stream fetches, front to back."""

    def __init__(self, block: PendingBlock, offset: int, left_bytes: int) -> None:
        self.block = block
        self.offset = offset
        self.left_bytes = left_bytes


class FetchWork:
    """Ranges that no stream has taken; the fetch's lock is held around every call."""

    def __init__(self, blocks: Sequence[PendingBlock]) -> None:
        self._waiting = deque(FetchSlice(x, 0, x.ref.payload_bytes) for x in blocks)
        self.waiting_bytes = sum(piece.left_bytes for piece in self._waiting)
        self.missing_bytes = self.waiting_bytes  # waiting, or with a stream
        self.open_blocks = len(blocks)  # blocks not yet verified

    def take(self, most_bytes: int) -> FetchSlice | None:
        """Take the next range, of about `most_bytes`."""
        if not self._waiting:
            return None
        piece = self._waiting[0]
        if piece.left_bytes <= most_bytes + most_bytes // 2:
            self._waiting.popleft()
        else:
            rest, piece = piece, FetchSlice(piece.block, piece.offset, most_bytes)
            rest.offset += most_bytes
            rest.left_bytes -= most_bytes
        self.waiting_bytes -= piece.left_bytes
        return piece

    def count_received(self, piece: FetchSlice, count_bytes: int) -> bool:
        """Count verified bytes at the front of `piece`; return whether its block is complete."""
        piece.offset += count_bytes
        piece.left_bytes -= count_bytes
        piece.block.missing_bytes -= count_bytes
        self.missing_bytes -= count_bytes
        return piece.block.missing_bytes == 0

    def give_back(self, pieces: Sequence[FetchSlice], *, cut: bool) -> None:
        """Give back the rest of these ranges; `cut` if their connection broke."""
        for piece in reversed(pieces):
            if piece.left_bytes:
                self._waiting.appendleft(piece)
                self.waiting_bytes += piece.left_bytes
                block = piece.block
                block.was_cut |= cut and block.missing_bytes < block.ref.payload_bytes

    def restart(self, block: PendingBlock) -> bool:
        """Discard a damaged block to fetch it again; return False if that happened too often."""
        block.wrong_count += 1
        if block.wrong_count >= TRANSFER_WRONG_MAX:
            return False
        block.start_over()
        self.missing_bytes += block.missing_bytes
        self.give_back([FetchSlice(block, 0, block.missing_bytes)], cut=False)
        return True


def pending_blocks(refs: Sequence[BlockRef]) -> list[PendingBlock]:
    """Return each distinct block once, largest first; raise RejectedError for invalid lengths."""
    if len(refs) > TICKET_BLOCKS_MAX:
        message = f"a fetch of {len(refs)} blocks is over the limit of {TICKET_BLOCKS_MAX}"
        raise RejectedError(message, code="invalid_fetch")
    if any(not 0 < ref.payload_bytes <= BLOCK_BYTES_MAX for ref in refs):
        message = "a block's length is out of range"
        raise RejectedError(message, code="invalid_fetch")
    distinct = {ref.name: PendingBlock(ref) for ref in refs}
    return sorted(distinct.values(), key=lambda block: -block.ref.payload_bytes)

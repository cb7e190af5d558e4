"""Index of stored blocks: references, pins and running changes. Memory only.

put: pin ─ busy[ write ] ─ indexed ─ retain (takes the pin) ─ … ─ release ─ sweep
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from fabric.ids import BlockHash
from fabric.kvcache.block_chain import BlockRef


class BlockIndex:
    """The stored blocks and their reference counts, for any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards everything below
        self._variants: dict[BlockHash, dict[BlockRef, int]] = {}  # to file bytes
        self._total_bytes = 0
        self._references: Counter[BlockRef] = Counter()
        self._pins: Counter[BlockRef] = Counter()
        self._unneeded: dict[BlockRef, None] = {}  # stored, with neither: a sweep looks no further
        self._busy: set[BlockRef] = set()  # being written, removed or quarantined

    def find(self, block_hash: BlockHash) -> BlockRef | None:
        """Return a stored block of this hash, whatever its bits."""
        with self._changed:
            return next(iter(self._variants.get(block_hash, ())), None)

    def has(self, ref: BlockRef) -> bool:
        """Return whether these very bytes are stored."""
        with self._changed:
            return self._has(ref)

    def missing(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        with self._changed:
            return [ref for ref in refs if not self._has(ref)]

    def snapshot(self) -> dict[BlockRef, int]:
        """Copy the index: each stored block and the bytes of its file."""
        with self._changed:
            return {ref: size for by_ref in self._variants.values() for ref, size in by_ref.items()}

    def shared(self, bytes_max: int) -> list[tuple[BlockRef, int]]:
        """List blocks with several references, most of them first, and the bytes of each file."""
        with self._changed:
            counts = {ref: count for ref, count in self._references.items() if count > 1}
            sizes = {ref: self._variants.get(ref.block_hash, {}).get(ref) for ref in counts}
        shared, total_bytes = [], 0
        for ref in sorted(counts, key=lambda ref: (-counts[ref], ref.name)):
            size_bytes = sizes[ref]
            if size_bytes is None:
                continue
            total_bytes += size_bytes
            if total_bytes > bytes_max:
                break
            shared.append((ref, size_bytes))
        return shared

    @property
    def total_bytes(self) -> int:
        with self._changed:
            return self._total_bytes

    def insert(self, ref: BlockRef, file_bytes: int) -> None:
        with self._changed:
            if not self._has(ref):
                self._variants.setdefault(ref.block_hash, {})[ref] = file_bytes
                self._total_bytes += file_bytes
                self._weigh(ref)

    def drop(self, ref: BlockRef) -> None:
        """Mark a block as gone; references to it stay counted."""
        with self._changed:
            self._drop(ref)

    def drop_all(self) -> None:
        """Mark all blocks as gone; references and pins stay counted."""
        with self._changed:
            self._variants.clear()
            self._unneeded.clear()
            self._total_bytes = 0

    def pin(self, ref: BlockRef) -> None:
        """Keep a block, stored or about to be, until its writer retains or abandons it."""
        with self._changed:
            self._pins[ref] += 1
            self._weigh(ref)

    def unpin(self, refs: Iterable[BlockRef]) -> None:
        with self._changed:
            for ref in dict.fromkeys(refs):
                self._unpin(ref)

    def retain(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        """Count a reference to each of `refs` in place of a pin; list those not stored."""
        counted = list(refs)
        with self._changed:
            self._references.update(counted)
            distinct = dict.fromkeys(counted)
            # Most refs are neither, since the previous record had them.
            for ref in [ref for ref in distinct if ref in self._pins or ref in self._unneeded]:
                self._unpin(ref)
            return [ref for ref in distinct if not self._has(ref)]

    def hold(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        """Count a reference as `retain` does, but leave writers their pins."""
        counted = list(refs)
        with self._changed:
            self._references.update(counted)
            for ref in dict.fromkeys(counted):
                self._weigh(ref)
            return [ref for ref in dict.fromkeys(counted) if not self._has(ref)]

    def references(self, ref: BlockRef) -> int:
        """Return how many references `retain` and `hold` have counted for a block."""
        with self._changed:
            return self._references[ref]

    def release(self, refs: Iterable[BlockRef]) -> None:
        """Undo one `retain` of the same `refs`."""
        with self._changed:
            for ref in refs:
                count = self._references[ref]
                assert count > 0, "a block is released as often as retained"
                if count > 1:
                    self._references[ref] = count - 1
                else:
                    del self._references[ref]
                    self._weigh(ref)

    def take_unreferenced(self, blocks_max: int) -> dict[BlockRef, int]:
        """Drop unreferenced idle blocks, and mark them busy until `settle`."""
        with self._changed:
            idle = (ref for ref in self._unneeded if ref not in self._busy)
            taken = {ref: self._variants[ref.block_hash][ref] for ref in islice(idle, blocks_max)}
            for ref in taken:
                self._drop(ref)
            self._busy |= taken.keys()
            return taken

    def settle(self, refs: Iterable[BlockRef]) -> None:
        """Release blocks that were marked busy."""
        with self._changed:
            self._busy.difference_update(refs)
            self._changed.notify_all()

    @contextmanager
    def exclusive(self, ref: BlockRef) -> Iterator[None]:
        """Hold the exclusive right to change this block's file."""
        with self._changed:
            self._changed.wait_for(lambda: ref not in self._busy)
            self._busy.add(ref)
        try:
            yield
        finally:
            self.settle([ref])

    def problems(self) -> list[str]:
        """List contradictions; empty in a sound index."""
        with self._changed:
            sizes = self.snapshot()
            unneeded = sizes.keys() - self._references.keys() - self._pins.keys()
            checks = (
                (sum(sizes.values()) == self._total_bytes, "total bytes are not the sum"),
                (all(self._variants.values()), "a hash without blocks is left"),
                (
                    min(self._references.values(), default=1) > 0,
                    "a reference count is not positive",
                ),
                (min(self._pins.values(), default=1) > 0, "a pin count is not positive"),
                (self._unneeded.keys() == unneeded, "the unneeded blocks are other ones"),
                (not self._busy, "a block is still busy"),
            )
        return [problem for holds, problem in checks if not holds]

    def _has(self, ref: BlockRef) -> bool:
        return ref in self._variants.get(ref.block_hash, ())

    def _drop(self, ref: BlockRef) -> None:
        if self._has(ref):
            by_ref = self._variants[ref.block_hash]
            self._total_bytes -= by_ref.pop(ref)
            if not by_ref:
                del self._variants[ref.block_hash]
            self._unneeded.pop(ref, None)

    def _unpin(self, ref: BlockRef) -> None:
        if self._pins[ref] > 1:
            self._pins[ref] -= 1
        else:
            del self._pins[ref]
            self._weigh(ref)

    def _weigh(self, ref: BlockRef) -> None:
        """Decide again whether a sweep may take this block."""
        if self._has(ref) and ref not in self._references and ref not in self._pins:
            self._unneeded[ref] = None
        else:
            self._unneeded.pop(ref, None)

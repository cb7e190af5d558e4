"""The warm tier: one model's blocks on one disk, shared by threads, records and peers.

A block is kept while a record refers to it (`retain`, `release`), or until its writer has
published one: `put` and `adopt` pin what they store until the next `retain` or `abandon` of
it. The rest is removed by `sweep`.

A read that leaves any doubt quarantines the file and is a miss: this store may lose data,
it never returns wrong data. Methods may be called from any thread.
"""

import logging
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from fabric.errors import CorruptDataError
from fabric.ids import BlockHash, Fingerprint
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.kvcache.hashing import token_bytes
from fabric.ports import DriveSpace
from node.limits import BLOCK_READERS
from node.store.block_files import BlockDisk, BlockFiles, file_name
from node.store.block_index import BlockIndex
from node.store.descriptors import Payload
from node.store.posix_disk import QUARANTINE, DiskError
from node.store.staging import Place

SWEEP_BLOCKS: Final = 256  # removed with one flush of the folder

_log = logging.getLogger(__name__)


class BlockMissingError(CorruptDataError):
    """The block is not stored here, or cannot be read now; callers treat it as a cache miss."""

    code = "block_missing"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Result of a sweep."""

    blocks_count: int
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """Result of a scrub: what it read, and the blocks that it quarantined."""

    blocks_count: int
    file_bytes: int
    damaged: tuple[BlockRef, ...]
    is_round_over: bool  # every block stored when the round began has been read


@dataclass(frozen=True, slots=True)
class LentBlock:
    """Payload of a block lent for sending; a block that fails to read is quarantined."""

    store: "BlockStore"
    ref: BlockRef
    payload: Payload

    @property
    def length(self) -> int:
        return self.payload.length

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`; raise CorruptDataError."""
        self.store.read_lent(self.ref, self.payload, view, offset)

    def close(self) -> None:
        self.payload.close()


class BlockStore:
    """Blocks by hash and checksum, with a reference count each."""

    def __init__(
        self,
        disk: BlockDisk,
        spec: ModelCacheSpec,
        fingerprint: Fingerprint,
        readers_count: int = BLOCK_READERS,
    ) -> None:
        """Open the blocks on a disk; `readers_count` threads read for one restore."""
        self.readers_count = readers_count
        self._disk = disk
        self._files = BlockFiles(disk, spec, fingerprint)
        self._index = BlockIndex()
        self._scrub_lock = threading.Lock()
        self._to_scrub: list[BlockRef] = []
        self._unstored: set[BlockRef] = set()  # blocks whose failed publish may have left a file
        self.damaged_count = 0  # blocks taken out of use since this process began

    def recover(self) -> int:
        """Rebuild the index; remove files that cannot be this model's blocks; return how many."""
        refs, foreign = self._files.list_all()
        for ref in refs:
            self._index.insert(ref, self._files.file_bytes(ref))
        if foreign:
            _log.warning("removing %d files that are not blocks of this model", len(foreign))
        try:
            return self._disk.remove_all(foreign)
        except DiskError as error:
            _log.error("cannot remove files that are not blocks of this model: %s", error.message)
            return 0

    def forget_all(self) -> None:
        """Forget all blocks, as the folder is gone; `recover` finds those that come back."""
        self._index.drop_all()
        self._unstored.clear()

    def is_stored(self, ref: BlockRef) -> bool:
        """Return whether a block is stored, and its file not known to be gone."""
        try:
            return self.has(ref) and self._files.exists(ref)
        except DiskError:
            return True

    # --- what is stored, and what must stay ---------------------------------------------------

    def find(self, block_hash: BlockHash) -> BlockRef | None:
        return self._index.find(block_hash)

    def references(self, ref: BlockRef) -> int:
        """Return the number of references to a block."""
        return self._index.references(ref)

    def has(self, ref: BlockRef) -> bool:
        """Return whether these very bytes are stored."""
        return self._index.has(ref)

    def shared(self, bytes_max: int) -> list[tuple[BlockRef, int]]:
        """List blocks that several records share, the most shared first, and their files' bytes."""
        return self._index.shared(bytes_max)

    def missing(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        return self._index.missing(refs)

    @property
    def total_bytes(self) -> int:
        return self._index.total_bytes

    def file_bytes(self, group: CacheGroup, tokens_count: int) -> int:
        return self._files.bytes_of(group, tokens_count)

    def sizes(self) -> dict[Hashable, int]:
        """Return the bytes of every block's file, header included."""
        return {ref: size for ref, size in self._index.snapshot().items()}  # noqa: C416 - widens

    def drive(self) -> DriveSpace:
        return self._disk.drive()

    def retain(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        """Add a record's reference to each of `refs`; return those that are not stored.

        Removes one writer's pin from each. Call it before the record is published.
        """
        return self._index.retain(refs)

    def hold(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        """Keep blocks for a reader until it releases them; return those that are not stored."""
        return self._index.hold(refs)

    def release(self, refs: Iterable[BlockRef]) -> None:
        """Undo one `retain` or `hold` of the same `refs`, so that a sweep may remove them."""
        self._index.release(refs)

    def abandon(self, refs: Iterable[BlockRef]) -> None:
        """Undo the pin of a `put` or `adopt` that no record refers to."""
        self._index.unpin(refs)

    # --- write -------------------------------------------------------------------------------

    def put(
        self,
        parent: BlockHash,
        block_hash: BlockHash,
        tokens: Sequence[int],
        kv_parts: Sequence[memoryview],
        group: CacheGroup = CacheGroup.FULL,
    ) -> BlockRef:
        """Store a block given as packed cache in file order, and pin it; return its name."""
        ref = self._files.make_ref(block_hash, tokens, kv_parts, group)
        self._publish(ref, parent, [*kv_parts, memoryview(token_bytes(tokens))])
        return ref

    def adopt(
        self, ref: BlockRef, parent: BlockHash, tokens: Sequence[int], payload: memoryview
    ) -> None:
        """Store a peer's block, and pin it; raise CorruptDataError if it does not match `ref`.

        The caller, which knows the tenant's salt, must check that `ref.block_hash` follows from
        parent and tokens.
        """
        self._files.check_received(ref, tokens, payload)
        self._publish(ref, parent, [payload])

    def _publish(self, ref: BlockRef, parent: BlockHash, parts: list[memoryview]) -> None:
        self._index.pin(ref)
        try:
            with self._index.exclusive(ref):
                if not self.has(ref):
                    self._unstored.add(ref)
                    self._files.write(ref, parent, parts)
                    self._unstored.discard(ref)
                    self._index.insert(ref, self._files.file_bytes(ref))
        except BaseException:
            self.abandon([ref])
            raise

    # --- read --------------------------------------------------------------------------------

    def load_into(
        self,
        ref: BlockRef,
        parent: BlockHash,
        tokens: Sequence[int],
        places: Sequence[Place | memoryview],
    ) -> None:
        """Read the packed cache of a block into `places`, given in file order.

        Raises BlockMissingError, or CorruptDataError after quarantining the file; after either,
        the content of `places` is undefined.
        """
        self._files.check_fit(ref, tokens)
        with self._quarantine_on_failure(ref):
            self._files.read(ref, parent, tokens, places)

    def open_payload(self, ref: BlockRef) -> LentBlock:
        """Open a block for sending; the caller closes it.

        The file stays readable even if a sweep removes it in the meantime. The receiver verifies
        the bytes. A file that cannot be read is quarantined.
        """
        with self._quarantine_on_failure(ref):
            return LentBlock(self, ref, self._files.lend(ref))

    def read_lent(self, ref: BlockRef, payload: Payload, view: memoryview, offset: int) -> None:
        """Fill `view` from an opened payload; raise CorruptDataError."""
        with self._quarantine_on_failure(ref):
            payload.read_into(view, offset)

    @contextmanager
    def _quarantine_on_failure(self, ref: BlockRef) -> Iterator[None]:
        """Quarantine a block if reading it fails, and raise a miss or CorruptDataError."""
        try:
            yield
        except FileNotFoundError:
            self._forget(ref)
            message = "block is not stored"
            raise BlockMissingError(message) from None
        except CorruptDataError as error:
            self._quarantine(ref, error.message)
            raise
        except DiskError as error:
            if not error.is_damage:  # such as too many open files: the block is not at fault
                raise BlockMissingError(error.message) from error
            self._quarantine(ref, error.message)
            raise CorruptDataError(error.message) from error

    def _forget(self, ref: BlockRef) -> None:
        with self._index.exclusive(ref), suppress(DiskError):
            if not self._files.exists(ref):  # another thread may have stored it again
                self._index.drop(ref)

    def _quarantine(self, ref: BlockRef, reason: str) -> None:
        with self._index.exclusive(ref):
            self._index.drop(ref)
            self.damaged_count += 1
            try:
                self._disk.quarantine(file_name(ref), reason)
            except DiskError as error:
                _log.error("cannot quarantine a damaged block, dropped it: %s", error.message)

    # --- upkeep ------------------------------------------------------------------------------

    def sweep(self) -> Sweep:
        """Remove every block that no record refers to and no writer has pinned."""
        self._remove_unstored()
        blocks_count = file_bytes = 0
        while unreferenced := self._index.take_unreferenced(SWEEP_BLOCKS):
            try:
                self._disk.remove_all([file_name(ref) for ref in unreferenced])
            except BaseException:
                self._index_left(unreferenced)
                raise
            finally:
                self._index.settle(unreferenced)
            blocks_count += len(unreferenced)
            file_bytes += sum(unreferenced.values())
        return Sweep(blocks_count, file_bytes)

    def _index_left(self, taken: Mapping[BlockRef, int]) -> None:
        """Index again the files that a failed removal has left."""
        for ref, size in taken.items():
            try:
                self._disk.size_bytes(file_name(ref))
            except FileNotFoundError:
                continue
            except (CorruptDataError, DiskError):
                self._unstored.add(ref)
            else:
                self._index.insert(ref, size)

    def _remove_unstored(self) -> None:
        """Remove files that a failed write has left."""
        for ref in list(self._unstored):
            with self._index.exclusive(ref):
                if not self.has(ref):
                    self._disk.remove(file_name(ref))
                self._unstored.discard(ref)

    def quarantined(self) -> list[str]:
        """List the damaged files that are kept for inspection."""
        return self._disk.list_names(QUARANTINE)

    def remove_leftovers(self) -> None:
        """Remove the temporary files of failed writes; raise DiskError."""
        self._disk.remove_leftovers()

    def empty_quarantine(self) -> list[str]:
        """Remove all damaged files, whose owners are unknown; return their names."""
        leaves = self.quarantined()
        if leaves:
            self._disk.remove_all([f"{QUARANTINE}/{leaf}" for leaf in leaves])
        return leaves

    def verify(self, refs: Iterable[BlockRef]) -> list[BlockRef]:
        """Read and check whole blocks; quarantine the damaged ones, and return them."""
        damaged = []
        for ref in filter(self.has, refs):
            try:
                with self._quarantine_on_failure(ref):
                    self._files.verify(ref)
            except BlockMissingError:
                continue
            except CorruptDataError:
                damaged.append(ref)
        return damaged

    def scrub(self, budget_bytes: int) -> Scrub:
        """Check some stored blocks, up to one over the budget, and quarantine damaged ones.

        Successive calls go through all blocks in rounds; a call ends early at the end of a round.
        """
        damaged: list[BlockRef] = []
        blocks_count = file_bytes = 0
        with self._scrub_lock:
            if not self._to_scrub:
                self._to_scrub = sorted(self._index.snapshot(), key=lambda ref: ref.name)
        while file_bytes < budget_bytes and (ref := self._next_to_scrub()) is not None:
            blocks_count += 1
            file_bytes += self._files.file_bytes(ref)
            damaged += self.verify([ref])
        with self._scrub_lock:
            is_round_over = not self._to_scrub
        return Scrub(blocks_count, file_bytes, tuple(damaged), is_round_over)

    def _next_to_scrub(self) -> BlockRef | None:
        with self._scrub_lock:
            while self._to_scrub:
                ref = self._to_scrub.pop()
                if self.has(ref):  # not swept since the round began
                    return ref
            return None

    def check_integrity(self) -> list[str]:
        """List all differences between index and disk; call it only while no other call runs."""
        indexed = self._index.snapshot()
        stored, foreign = self._files.list_all()
        problems = self._index.problems()
        problems += [f"{ref.name} is indexed but not stored" for ref in indexed.keys() - {*stored}]
        problems += [f"{ref.name} is stored but not indexed" for ref in {*stored} - indexed.keys()]
        problems += [f"{name} is no block" for name in foreign]
        return problems

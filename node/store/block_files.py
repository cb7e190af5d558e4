"""Block files: write, read with every check, name and quarantine one at a time.

Files are `blocks/<hash>-<checksum>.<group>` in one flat folder. This module does not know which
records need them.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fabric.errors import CorruptDataError, require
from fabric.ids import BlockHash, Checksum, Fingerprint
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.block_file import (
    parse_parent,
    payload_bytes,
    payload_tensors,
    render_block_header,
    tokens_by_file_bytes,
)
from fabric.kvcache.cache_spec import CacheGroup, ModelCacheSpec
from fabric.kvcache.hashing import payload_checksum, token_bytes
from fabric.limits import BLOCK_TOKENS
from fabric.ports import Disk, OpenFile
from node.store.descriptors import Payload
from node.store.posix_disk import DiskError
from node.store.staging import Place, portions, staging_buffer

DIRECTORY: Final = "blocks"
_LEAF: Final = re.compile(r"([0-9a-f]{64})-([0-9a-f]{32})\.(full|window|state)", re.ASCII)

# Bits that are all set in an infinity or NaN.
_EXPONENT_BITS: Final = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}

_log = logging.getLogger(__name__)


class BlockDisk(Disk, Protocol):
    """Disk with the calls that block files need beyond the common port."""

    def lend(self, name: str, start: int, length: int) -> Payload:
        """Open a part of a file for sending; the caller closes it."""
        ...

    def remove_all(self, names: Sequence[str]) -> int:
        """Remove files durably, with one flush; return how many existed."""
        ...

    def remove_leftovers(self) -> None:
        """Remove the temporaries that failed writes could not; raise DiskError."""
        ...


class BlockFiles:
    """The files of one model's blocks. A read that fails raises and changes nothing."""

    def __init__(self, disk: BlockDisk, spec: ModelCacheSpec, fingerprint: Fingerprint) -> None:
        self._disk = disk
        self._spec = spec
        self._fingerprint = fingerprint
        # A token count's bytes and back, for each group of layers that the model has.
        self._counts = {group: tokens_by_file_bytes(spec, group) for group in _groups(spec)}
        self._sizes = {
            group: {count: size for size, count in counts.items()}
            for group, counts in self._counts.items()
        }

    def file_bytes(self, ref: BlockRef) -> int:
        """Bytes of the block's file, header included."""
        return self._sizes[ref.group][ref.tokens_count]

    def bytes_of(self, group: CacheGroup, tokens_count: int) -> int:
        return self._sizes[group][tokens_count]

    def make_ref(
        self,
        block_hash: BlockHash,
        tokens: Sequence[int],
        kv_parts: Iterable[memoryview],
        group: CacheGroup,
    ) -> BlockRef:
        """Return the reference of a block with these tokens and packed cache, in file order."""
        parts = [*kv_parts, memoryview(token_bytes(tokens))]
        size = payload_bytes(self._spec, len(tokens), group)
        assert sum(part.nbytes for part in parts) == size, "the parts are the whole block"
        return BlockRef(block_hash, payload_checksum(parts), len(tokens), size, group)

    def check_fit(self, ref: BlockRef, tokens: Sequence[int]) -> None:
        """Raise CorruptDataError unless `ref` can be a block of these tokens and this model."""
        count = len(tokens)
        is_count = 0 < count <= BLOCK_TOKENS and ref.tokens_count == count
        is_count = is_count and ref.group in self._sizes
        fits = is_count and ref.payload_bytes == payload_bytes(self._spec, count, ref.group)
        require(fits, "block reference does not fit this model and these tokens")

    def check_received(self, ref: BlockRef, tokens: Sequence[int], payload: memoryview) -> None:
        """Raise CorruptDataError unless `payload` matches `ref` and ends with these tokens."""
        self.check_fit(ref, tokens)
        packed = token_bytes(tokens)
        require(payload.nbytes == ref.payload_bytes, "received block has the wrong length")
        require(payload.cast("B")[-len(packed) :] == packed, "received block has the wrong tokens")
        require(
            payload_checksum([payload]) == ref.checksum, "received block has the wrong checksum"
        )

    def list_all(self) -> tuple[list[BlockRef], list[str]]:
        """List the blocks found, and the files that cannot be blocks of this model."""
        refs, foreign = [], []
        for leaf in self._disk.list_names(DIRECTORY):
            try:
                ref = self._ref_of_file(leaf)
            except DiskError as error:
                if not error.is_damage:
                    raise
                _log.error("skipped a block: %s", error.message)
                continue
            if ref is None:
                foreign.append(f"{DIRECTORY}/{leaf}")
            else:
                refs.append(ref)
        return refs, foreign

    def write(self, ref: BlockRef, parent: BlockHash, parts: Iterable[memoryview]) -> None:
        """Publish a block, before any record that names it; a failure leaves no file."""
        try:
            self._disk.publish_ordered(file_name(ref), [self._header(ref, parent), *parts])
        except BaseException:
            # Failing at its last step, a publish leaves a file that may not be durable.
            with suppress(DiskError):
                self._disk.remove(file_name(ref))
            raise

    def read(
        self,
        ref: BlockRef,
        parent: BlockHash,
        tokens: Sequence[int],
        places: Sequence[Place | memoryview],
    ) -> None:
        """Read the packed cache into `places`; raise FileNotFoundError or CorruptDataError."""
        expected_header, expected_tokens = self._header(ref, parent), token_bytes(tokens)
        header, packed = bytearray(len(expected_header)), bytearray(len(expected_tokens))
        room = sum(map(attrgetter("nbytes"), places)) + len(packed)
        assert room == ref.payload_bytes, "the places are as large as the packed cache"
        targets = [np.asarray(place) for place in (*places, memoryview(packed))]
        with self._open_file(ref) as file:
            _fill(file, 0, [memoryview(header)])
            checksum = payload_checksum(_read_parts(file, len(header), targets))
        require(header == expected_header, "block header is not this block's")
        require(packed == expected_tokens, "block holds other tokens")
        require(checksum == ref.checksum, "block checksum does not match")

    def verify(self, ref: BlockRef) -> None:
        """Read a block as a whole; raise FileNotFoundError or CorruptDataError."""
        at = self.file_bytes(ref) - ref.payload_bytes
        header = bytearray(at)
        with self._open_file(ref) as file:
            _fill(file, 0, [memoryview(header)])
            named = (ref.block_hash, ref.tokens_count, ref.group)
            parse_parent(bytes(header), self._spec, self._fingerprint, *named)
            checksum = payload_checksum(_pieces(file, at, ref.payload_bytes))
        require(checksum == ref.checksum, "block checksum differs")

    def lend(self, ref: BlockRef) -> Payload:
        """Open a block's data for sending; the caller closes it."""
        with self._open_file(ref):
            pass  # opening it has checked its length
        start = self.file_bytes(ref) - ref.payload_bytes
        return self._disk.lend(file_name(ref), start, ref.payload_bytes)

    def exists(self, ref: BlockRef) -> bool:
        """Return whether the block's file exists, even if it is damaged."""
        try:
            self._disk.size_bytes(file_name(ref))
        except FileNotFoundError:
            return False
        except CorruptDataError:
            pass
        return True

    def _header(self, ref: BlockRef, parent: BlockHash) -> bytes:
        return render_block_header(
            self._spec, self._fingerprint, parent, ref.block_hash, ref.tokens_count, ref.group
        )

    def _ref_of_file(self, leaf: str) -> BlockRef | None:
        named = parse_leaf(leaf)
        try:
            file_bytes = self._disk.size_bytes(f"{DIRECTORY}/{leaf}")
        except (FileNotFoundError, CorruptDataError):
            return None
        if named is None:
            return None
        block_hash, checksum, group = named
        count = self._counts.get(group, {}).get(file_bytes)
        if count is None:
            return None
        size = payload_bytes(self._spec, count, group)
        return BlockRef(block_hash, checksum, count, size, group)

    @contextmanager
    def _open_file(self, ref: BlockRef) -> Iterator[OpenFile]:
        """Open a block's file; raise CorruptDataError where it has another length."""
        with self._disk.opened(file_name(ref)) as file:
            expected = self._sizes.get(ref.group, {}).get(ref.tokens_count)
            require(file.size_bytes == expected, "block file has another length")
            yield file


def _fill(file: OpenFile, offset: int, buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` from `offset` on; return their size; raise CorruptDataError if it is short."""
    size_bytes = sum(buffer.nbytes for buffer in buffers)
    require(file.read_into(buffers, offset) == size_bytes, "block file was cut short")
    return size_bytes


def _pieces(file: OpenFile, offset: int, size_bytes: int) -> Iterator[memoryview]:
    """Yield a file's bytes from `offset` on, through the staging buffer."""
    end = offset + size_bytes
    while offset < end:
        staged = staging_buffer()[: end - offset]
        offset += _fill(file, offset, [staged.data])
        yield staged.data


def _read_parts(file: OpenFile, offset: int, places: Sequence[Place]) -> Iterator[memoryview]:
    """Fill `places` from `offset` on, yielding the bytes in file order."""
    for portion in portions(places):
        offset += _fill(file, offset, [portion.view])
        yield portion.view
        portion.put_in_place()


def file_name(ref: BlockRef) -> str:
    """Return the file name of a block: hex digits and its group only."""
    return f"{DIRECTORY}/{ref.name}.{ref.group.value}"


def parse_leaf(leaf: str) -> tuple[BlockHash, Checksum, CacheGroup] | None:
    """Parse hash, checksum and group from a block file's name; return None for any other name."""
    match = _LEAF.fullmatch(leaf)
    if match is None:
        return None
    block_hash, checksum = map(bytes.fromhex, match.groups()[:2])
    return BlockHash(block_hash), Checksum(checksum), CacheGroup(match[3])


def _groups(spec: ModelCacheSpec) -> tuple[CacheGroup, ...]:
    """List the groups with files: the first always has them, if only for its tokens."""
    return tuple(dict.fromkeys((CacheGroup.FULL, *spec.groups)))


def require_finite(
    spec: ModelCacheSpec, group: CacheGroup, tokens_count: int, payload: memoryview
) -> None:
    """Raise CorruptDataError if a block's payload holds an infinity or NaN.

    A block that a node computed, or fetched from an authenticated peer, comes from a model. One in
    a hibernation file signed with a client's key may hold anything, and one infinite scale makes
    every logit of its agent NaN.
    """
    at = 0
    for tensor in payload_tensors(spec, tokens_count, group):
        end = at + tensor.size_bytes
        bits = _EXPONENT_BITS.get(tensor.dtype)
        if bits is not None and _has_all_bits(np.frombuffer(payload[at:end], np.uint8), bits):
            message = "a block holds numbers that are not finite"
            raise CorruptDataError(message)
        at = end


def _has_all_bits(raw: NDArray[np.uint8], bits: int) -> bool:
    """Return whether any number has all of these bits set."""
    if bits > np.iinfo(np.uint16).max:
        return bool(((raw.view(np.uint32) & np.uint32(bits)) == bits).any())
    return bool(((raw.view(np.uint16) & np.uint16(bits)) == bits).any())

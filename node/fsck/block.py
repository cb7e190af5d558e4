"""Check of one block file: header, length, checksum, and its name if the key is known."""

from collections.abc import Iterator
from dataclasses import dataclass

from fabric.errors import CorruptDataError, require
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.block_file import TOKEN_BYTES, parse_parent, read_block_header
from fabric.kvcache.hashing import block_hash, group_hash, payload_checksum
from fabric.kvcache.safetensors_header import LENGTH_BYTES
from fabric.limits import BLOCK_BYTES_MAX, HEADER_BYTES_MAX, MIB
from fabric.ports import Disk
from fabric.record.spec_file import SpecRecord
from node.store.block_files import DIRECTORY, parse_leaf

PREFIX_BYTES = LENGTH_BYTES + HEADER_BYTES_MAX
FILE_BYTES_MAX = PREFIX_BYTES + BLOCK_BYTES_MAX
PIECE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """Check of single block files of one folder."""

    disk: Disk
    folder: str  # begins the fingerprint
    spec: SpecRecord | None

    def check(self, leaf: str, salt: bytes | None) -> BlockRef:
        """Read and check a block's file; return its reference, or raise CorruptDataError.

        With the tenant's `salt`, also check that the block's name follows from its parent and
        tokens.
        """
        named = parse_leaf(leaf)
        if named is None:
            message = "the file name is not a block's"
            raise CorruptDataError(message)
        name, checksum, group = named
        path = f"{DIRECTORY}/{leaf}"
        file_bytes = self.disk.size_bytes(path)
        require(file_bytes <= FILE_BYTES_MAX, "the file is longer than any block")
        buffer = memoryview(bytearray(min(PREFIX_BYTES, file_bytes)))
        prefix = bytes(buffer[: self.disk.read_into(path, 0, [buffer])])
        header = read_block_header(prefix, file_bytes)
        require(
            (header.block_hash, header.group) == (name, group),
            "the header belongs to another block",
        )
        require(
            header.fingerprint.hex().startswith(self.folder), "the block belongs to another model"
        )
        if self.spec is not None:
            known, raw_header = self.spec, prefix[: header.data_start]
            parse_parent(
                raw_header, known.spec, known.fingerprint, name, header.tokens_count, group
            )
        payload = _Pieces(self.disk, path, header.data_start, file_bytes, header.tokens_count)
        require(payload_checksum(payload) == checksum, "the block's checksum does not match")
        if salt is not None:
            tokens = memoryview(payload.end).cast("I").tolist()
            chain = block_hash(salt, header.fingerprint, header.parent, tokens)
            require(
                group_hash(salt, chain, group) == name,
                "the block's name does not match its contents",
            )
        return BlockRef(name, checksum, header.tokens_count, file_bytes - header.data_start, group)


class _Pieces:
    """A block's data, read a piece at a time; keeps the last bytes, which are its tokens."""

    def __init__(
        self, disk: Disk, path: str, start: int, file_bytes: int, tokens_count: int
    ) -> None:
        self._disk, self._path = disk, path
        self._range = range(start, file_bytes, PIECE_BYTES)
        self._file_bytes = file_bytes
        self._end_bytes = TOKEN_BYTES * tokens_count
        self.end = b""

    def __iter__(self) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(PIECE_BYTES, self._file_bytes)))
        for offset in self._range:
            piece = buffer[: self._file_bytes - offset]
            count = self._disk.read_into(self._path, offset, [piece])
            require(count == len(piece), "block file was cut short")
            self.end = (self.end + bytes(piece[-self._end_bytes :]))[-self._end_bytes :]
            yield piece

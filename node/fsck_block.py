"""Check one block file on its own: header, length, checksum, and its name if the key is known."""

from dataclasses import dataclass

from fabric.block import BlockRef
from fabric.block_file import parse_parent, read_block_header
from fabric.errors import CorruptDataError
from fabric.hashing import block_hash, group_hash, payload_checksum
from fabric.limits import BLOCK_BYTES_MAX, HEADER_BYTES_MAX
from fabric.ports import Disk
from fabric.safetensors_header import LENGTH_BYTES
from fabric.spec_file import SpecRecord
from node.block_files import DIRECTORY, parse_leaf

FILE_BYTES_MAX = LENGTH_BYTES + HEADER_BYTES_MAX + BLOCK_BYTES_MAX


@dataclass(frozen=True, slots=True)
class BlockCheck:
    """What is known of a folder's blocks before any is read."""

    disk: Disk
    folder: str  # begins the fingerprint
    spec: SpecRecord | None

    def check(self, leaf: str, salt: bytes | None) -> BlockRef:
        """Read a block's file; return what it is, or raise CorruptDataError.

        With the tenant's `salt`, its name must follow from the parent and tokens in it.
        """
        named = parse_leaf(leaf)
        if named is None:
            message = "not the name of a block"
            raise CorruptDataError(message)
        name, checksum, group = named
        raw = memoryview(self.disk.read(f"{DIRECTORY}/{leaf}", FILE_BYTES_MAX))
        prefix = bytes(raw[: LENGTH_BYTES + HEADER_BYTES_MAX])
        said = read_block_header(prefix, len(raw))
        _require((said.block_hash, said.group) == (name, group), "block is another one's")
        _require(said.fingerprint.hex().startswith(self.folder), "block is of another model")
        if self.spec is not None:
            known, header = self.spec, prefix[: said.data_start]
            parse_parent(header, known.spec, known.fingerprint, name, said.tokens_count, group)
        payload = raw[said.data_start :]
        _require(payload_checksum([payload]) == checksum, "block checksum differs")
        if salt is not None:
            tokens = payload[-4 * said.tokens_count :].cast("I").tolist()
            chain = block_hash(salt, said.fingerprint, said.parent, tokens)
            _require(group_hash(salt, chain, group) == name, "block's name does not follow from it")
        return BlockRef(name, checksum, said.tokens_count, len(payload), group)


def _require(holds: bool, message: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise CorruptDataError(message)

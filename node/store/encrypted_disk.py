"""Disk with encrypted files (`node.encrypt_at_rest`).

Decrypted bytes are checked like those of a plain file: encryption
(`node/store/encrypted_file.py`) replaces none of the checks. Files are written and read in
pieces, whatever their length.

A folder that ever held encrypted files has a marker that names the key. Plain files stay readable
as well, so that the setting may be turned on and off.
"""

import hmac
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from fabric.errors import CorruptDataError, FatalError
from fabric.limits import MIB
from node.store.block_files import DIRECTORY as BLOCKS
from node.store.descriptors import SHORTER, Payload, write_all
from node.store.encrypted_file import MAGIC, EncryptedFile, encrypted_parts
from node.store.folder_format import SPEC_FILE
from node.store.manifest_store import DIRECTORY as MANIFESTS
from node.store.posix_disk import QUARANTINE, Part, PosixDisk

MARKER: Final = "sealed"
_KEY_ID_BYTES: Final = 16
_PIECE_BYTES: Final = MIB  # piece of a file that is encrypted in place

_log = logging.getLogger(__name__)


def at_rest_key(cluster_key: bytes) -> bytes:
    """Derive the 32-byte key of a cluster's encrypted files."""
    return blake2b(digest_size=32, key=cluster_key, person=b"mf-at-rest").digest()


def open_disk(
    folder: Path,
    durability: str,
    cluster_key: bytes | None,
    *,
    encrypts: bool | None = None,
    keeps_modes: bool = False,
) -> PosixDisk:
    """Open a model's folder; raise FatalError where its files are encrypted with another key.

    `encrypts`: whether new files are encrypted; None: if the folder ever held encrypted files.
    """
    plain = PosixDisk(folder, durability, keeps_modes=keeps_modes)
    try:
        marker: bytes | None = plain.read(MARKER, len(MAGIC) + _KEY_ID_BYTES)
    except FileNotFoundError:
        marker = None
    if marker is None and not encrypts:
        return plain
    try:
        key = _key_of(folder, marker, cluster_key)
        if marker is None:  # mark the folder before it holds encrypted files
            plain.publish(MARKER, [_file_head(key)])
    finally:
        plain.close()
    encrypts_new = encrypts is not False
    return EncryptedDisk(
        folder, durability, key=key, encrypts=encrypts_new, keeps_modes=keeps_modes
    )


def _key_of(folder: Path, marker: bytes | None, cluster_key: bytes | None) -> bytes:
    """Return the key of a folder's files; raise FatalError unless its marker names that key."""
    if cluster_key is None:
        message = f"{folder} is encrypted, and there is no cluster key to read it with"
        raise FatalError(message)
    key = at_rest_key(cluster_key)
    if marker is not None and not hmac.compare_digest(marker, _file_head(key)):
        message = f"{folder} is encrypted with another cluster key than this one"
        raise FatalError(message)
    return key


def _file_head(key: bytes) -> bytes:
    return MAGIC + blake2b(digest_size=_KEY_ID_BYTES, key=key, person=b"mf-at-rest-id").digest()


@dataclass(frozen=True, slots=True)
class EncryptedPayload:
    """A block's payload in an encrypted file: each slice is decrypted on request."""

    file: EncryptedFile
    start: int
    length: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`; raise CorruptDataError where the file has fewer bytes, or damaged ones."""
        if self.file.read_into([view], self.start + offset) != len(view):
            raise CorruptDataError(SHORTER)

    def close(self) -> None:
        self.file.close()


class EncryptedDisk(PosixDisk):
    """PosixDisk that reads plain and encrypted files, and encrypts new ones if `encrypts`."""

    def __init__(
        self,
        root: Path | str,
        durability: str = "full",
        *,
        key: bytes,
        encrypts: bool = True,
        keeps_modes: bool = False,
    ) -> None:
        super().__init__(root, durability, keeps_modes=keeps_modes)
        self._key = key
        self._encrypts = encrypts

    def encrypt_all(self) -> int:
        """Encrypt files stored before the setting was turned on; return their number."""
        if not self._encrypts:
            return 0
        count = sum(1 for size_bytes in self.encrypt_files() if size_bytes)
        if count:
            _log.info("encrypted %d files that were not", count)
        return count

    def encrypt_files(self) -> Iterator[int]:
        """Encrypt one file after another; yield the bytes of each, 0 where it was encrypted."""
        names = [SPEC_FILE]
        for directory in (MANIFESTS, QUARANTINE, BLOCKS):
            names += [f"{directory}/{leaf}" for leaf in self.list_names(directory)]
        for name in names:
            with suppress(FileNotFoundError):
                yield self._encrypt_file(name)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return the whole file; raise FileNotFoundError or CorruptDataError."""
        with self.opened(name) as file:
            size_bytes = file.size_bytes
            if size_bytes > limit_bytes:
                message = f"{name} has {size_bytes} bytes, over the limit of {limit_bytes}"
                raise CorruptDataError(message)
            whole = memoryview(bytearray(size_bytes))
            return bytes(whole[: file.read_into([whole], 0)])

    def lend(self, name: str, start: int, length: int) -> Payload:
        """Open a part of a file for sending; the caller closes it."""
        descriptor = self.open_payload(name)
        try:
            file = EncryptedFile(descriptor, self._key, name)
        except BaseException:
            os.close(descriptor)
            raise
        return EncryptedPayload(file, start, length)

    def size_bytes(self, name: str) -> int:
        """Return the length of a file's decrypted content; raise FileNotFoundError."""
        with self.opened(name) as file:
            return file.size_bytes

    @contextmanager
    def opened(self, name: str) -> Iterator[EncryptedFile]:
        """Open a file for several reads; raise FileNotFoundError or CorruptDataError."""
        with self._reading(name) as descriptor:
            yield EncryptedFile(descriptor, self._key, name)

    def _write(self, descriptor: int, parts: Iterable[Part]) -> None:
        """Write a file's content, encrypted if the setting says so."""
        if not self._encrypts:
            super()._write(descriptor, parts)
            return
        for piece in encrypted_parts(self._key, parts):
            write_all(descriptor, [piece])

    def _encrypt_file(self, name: str) -> int:
        with self.opened(name) as file:
            if file.is_encrypted:
                return 0
            self._publish(name, _pieces(file), self._ordering)
            return max(1, file.size_bytes)


def _pieces(file: EncryptedFile) -> Iterator[memoryview]:
    """Yield a file's bytes; each piece is valid until the next is requested."""
    piece, offset = memoryview(bytearray(_PIECE_BYTES)), 0
    while count := file.read_into([piece], offset):
        yield piece[:count]
        offset += count

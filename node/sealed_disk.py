"""A disk whose files are encrypted, for operators who ask for it (`node.encrypt_at_rest`).

    "MFSEAL01" | salt 32 | chunks of 64 KiB, each AES-256-GCM with its tag

Nonces never repeat under one key: every publish draws a salt, from which with the node's key
the file's own key follows, and under that a chunk's nonce is its number and whether it is the
last. So chunks cannot be exchanged, left out or cut off, within a file or between files. What
is read decrypted is then checked like any plain file: encryption replaces none of the checks.

A folder that ever held such files has a marker that names the key. Files that are not
encrypted stay readable beside them, so that the setting may be turned on and off.
"""

import hmac
import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fabric.errors import CorruptDataError, FatalError
from fabric.limits import KIB
from node.block_files import DIRECTORY as BLOCKS
from node.descriptors import read_all
from node.manifest_store import DIRECTORY as MANIFESTS
from node.posix_disk import QUARANTINE, PosixDisk

MAGIC: Final = b"MFSEAL01"
MARKER: Final = "sealed"
SALT_BYTES: Final = 32
HEAD_BYTES: Final = len(MAGIC) + SALT_BYTES
TAG_BYTES: Final = 16
CHUNK_BYTES: Final = 64 * KIB
SEALED_CHUNK_BYTES: Final = CHUNK_BYTES + TAG_BYTES
_GULP_CHUNKS: Final = 16  # read with one call
_KEY_ID_BYTES: Final = 16
_COUNTER_BYTES: Final = 11

_log = logging.getLogger(__name__)


def at_rest_key(cluster_key: bytes) -> bytes:
    """Derive the 32-byte key of a cluster's encrypted files."""
    return blake2b(digest_size=32, key=cluster_key, person=b"mf-at-rest").digest()


def open_disk(
    folder: Path,
    durability: str,
    cluster_key: bytes | None,
    *,
    seals: bool | None = None,
    keeps_modes: bool = False,
) -> PosixDisk:
    """Open a model's folder; raise FatalError where its files are encrypted with another key.

    `seals`: whether what is written gets encrypted; None: if anything ever was.
    """
    plain = PosixDisk(folder, durability, keeps_modes=keeps_modes)
    try:
        marker: bytes | None = plain.read(MARKER, len(MAGIC) + _KEY_ID_BYTES)
    except FileNotFoundError:
        marker = None
    if marker is None and not seals:
        return plain
    plain.close()
    if cluster_key is None:
        message = f"{folder} is encrypted, and there is no cluster key to read it with"
        raise FatalError(message)
    key = at_rest_key(cluster_key)
    named = MAGIC + blake2b(digest_size=_KEY_ID_BYTES, key=key, person=b"mf-at-rest-id").digest()
    if marker is not None and not hmac.compare_digest(marker, named):
        message = f"{folder} is encrypted with another cluster key than this one"
        raise FatalError(message)
    is_sealing = seals is not False
    disk = SealedDisk(folder, durability, key=key, seals=is_sealing, keeps_modes=keeps_modes)
    if marker is None:
        disk.mark(named)
    return disk


class SealedDisk(PosixDisk):
    """A PosixDisk that encrypts what it publishes, if told so, and reads both kinds."""

    def __init__(
        self,
        root: Path | str,
        durability: str = "full",
        *,
        key: bytes,
        seals: bool = True,
        keeps_modes: bool = False,
    ) -> None:
        super().__init__(root, durability, keeps_modes=keeps_modes)
        self._key = key
        self._seals = seals

    def mark(self, named: bytes) -> None:
        """Say in the folder that it holds encrypted files, before it does."""
        super().publish(MARKER, [named])

    def seal_all(self) -> int:
        """Encrypt what was stored before the setting was turned on; count the files."""
        if not self._seals:
            return 0
        count = 0
        for directory in (BLOCKS, MANIFESTS, QUARANTINE):
            for leaf in self.list_names(directory):
                count += self._seal_one(f"{directory}/{leaf}")
        if count:
            _log.info("encrypted %d files that were not", count)
        return count

    def publish(self, name: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Make `name` hold exactly `parts`, encrypted, as PosixDisk does."""
        super().publish(name, [self._sealed(b"".join(parts))] if self._seals else parts)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return the whole file; raise FileNotFoundError or CorruptDataError."""
        raw = super().read(name, sealed_bytes(limit_bytes))
        if not raw.startswith(MAGIC):
            whole = raw
        else:
            cipher, count = self._cipher(raw), _chunks_count(len(raw))
            body = memoryview(raw)[HEAD_BYTES:]
            whole = b"".join(_opened(cipher, body, range(count), count, name))
        if len(whole) > limit_bytes:
            message = f"{name} has {len(whole)} bytes, over the limit of {limit_bytes}"
            raise CorruptDataError(message)
        return whole

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill `buffers` from `offset` in order; return the bytes read (short at end of file)."""
        with self._reading(name) as descriptor:
            file_bytes = os.fstat(descriptor).st_size
            head = bytearray(HEAD_BYTES)
            head_count = read_all(descriptor, [memoryview(head)])
            if not head.startswith(MAGIC):
                os.lseek(descriptor, offset, os.SEEK_SET)
                return read_all(descriptor, buffers)
            if head_count < HEAD_BYTES:
                message = f"{name} was cut short"
                raise CorruptDataError(message)
            plain = self._plain_from(descriptor, bytes(head), file_bytes, offset, name)
            return _scatter(plain, buffers)

    def size_bytes(self, name: str) -> int:
        """Return the length of what the file holds; raise FileNotFoundError."""
        with self._reading(name) as descriptor:
            file_bytes = os.fstat(descriptor).st_size
            lead = bytearray(len(MAGIC))
            read_all(descriptor, [memoryview(lead)])
        if lead != MAGIC:
            return file_bytes
        return file_bytes - HEAD_BYTES - TAG_BYTES * _chunks_count(file_bytes)

    def _seal_one(self, name: str) -> bool:
        raw = super().read(name, super().size_bytes(name))
        if raw.startswith(MAGIC):
            return False
        self.publish(name, [raw])
        return True

    def _sealed(self, whole: bytes) -> bytearray:
        made = bytearray(sealed_bytes(len(whole)))
        made[:HEAD_BYTES] = MAGIC + secrets.token_bytes(SALT_BYTES)
        cipher, count = self._cipher(made), _chunks_count(len(made))
        plain, out = memoryview(whole), memoryview(made)[HEAD_BYTES:]
        for index in range(count):
            chunk = plain[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            start = index * SEALED_CHUNK_BYTES
            place = out[start : start + len(chunk) + TAG_BYTES]
            cipher.encrypt_into(_nonce(index, count), chunk, None, place)
        return made

    def _cipher(self, raw: bytes | bytearray) -> AESGCM:
        """Return the cipher of the file that begins like `raw`."""
        salt = bytes(raw[len(MAGIC) : HEAD_BYTES])
        key = blake2b(salt, digest_size=32, key=self._key, person=b"mf-at-rest-file").digest()
        return AESGCM(key)

    def _plain_from(
        self, descriptor: int, head: bytes, file_bytes: int, offset: int, name: str
    ) -> Iterator[memoryview]:
        """Yield what the file holds from `offset` on, reading as far as it is asked for."""
        cipher, count = self._cipher(head), _chunks_count(file_bytes)
        first, skip = divmod(offset, CHUNK_BYTES)
        gulp = memoryview(bytearray(_GULP_CHUNKS * SEALED_CHUNK_BYTES))
        for start in range(first, count, _GULP_CHUNKS):
            os.lseek(descriptor, HEAD_BYTES + start * SEALED_CHUNK_BYTES, os.SEEK_SET)
            body = gulp[: read_all(descriptor, [gulp])]
            numbers = range(start, min(start + _GULP_CHUNKS, count))
            for plain in _opened(cipher, body, numbers, count, name):
                yield memoryview(plain)[skip:]
                skip = 0


def sealed_bytes(plain_bytes: int) -> int:
    """Return the length of the encrypted file that holds so many bytes."""
    count = max(1, -(-plain_bytes // CHUNK_BYTES))
    return HEAD_BYTES + plain_bytes + count * TAG_BYTES


def _chunks_count(file_bytes: int) -> int:
    count = -(-(file_bytes - HEAD_BYTES) // SEALED_CHUNK_BYTES)
    last_bytes = file_bytes - HEAD_BYTES - (count - 1) * SEALED_CHUNK_BYTES
    if count < 1 or last_bytes < TAG_BYTES:
        message = "an encrypted file has a length that none has"
        raise CorruptDataError(message)
    return count


def _nonce(index: int, count: int) -> bytes:
    return index.to_bytes(_COUNTER_BYTES, "big") + bytes([index == count - 1])


def _opened(
    cipher: AESGCM, body: memoryview, numbers: range, count: int, name: str
) -> Iterator[bytes]:
    """Decrypt the chunks of these numbers, of which `body` holds one after another."""
    for at, index in enumerate(numbers):
        chunk = body[at * SEALED_CHUNK_BYTES : (at + 1) * SEALED_CHUNK_BYTES]
        try:
            yield cipher.decrypt(_nonce(index, count), chunk, None)
        except InvalidTag:
            message = f"{name} does not decrypt"
            raise CorruptDataError(message) from None


def _scatter(plain: Iterator[memoryview], buffers: Sequence[memoryview]) -> int:
    """Fill `buffers` in order; return the bytes that there were."""
    total, rest = 0, memoryview(b"")
    for buffer in buffers:
        room = buffer.cast("B")
        while room:
            if not rest:
                rest = next(plain, memoryview(b""))
                if not rest:
                    return total
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            room, rest, total = room[count:], rest[count:], total + count
    return total

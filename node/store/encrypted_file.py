"""Encrypted files, read and written in pieces: at most two megabytes are in memory.

    "MFSEAL01" | salt 32 | chunks of 64 KiB, each AES-256-GCM with its tag

Nonces never repeat under one key: each file has a random salt, its key is derived from that and
the node's key, and a chunk's nonce is its number and whether it is the last. So chunks cannot be
exchanged, left out or cut off, within a file or between files.
"""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fabric.errors import CorruptDataError
from fabric.limits import KIB
from node.store.descriptors import read_all

MAGIC: Final = b"MFSEAL01"
SALT_BYTES: Final = 32
HEAD_BYTES: Final = len(MAGIC) + SALT_BYTES
TAG_BYTES: Final = 16
CHUNK_BYTES: Final = 64 * KIB
ENCRYPTED_CHUNK_BYTES: Final = CHUNK_BYTES + TAG_BYTES
GULP_CHUNKS: Final = 16  # read or written with one call
_COUNTER_BYTES: Final = 11

Part = bytes | bytearray | memoryview


class EncryptedFile:
    """An open file that may be encrypted; one that is not is read as it is.

    The caller that opened the descriptor closes it, unless `close` is called.
    """

    def __init__(self, descriptor: int, key: bytes, name: str) -> None:
        """Read the head; raise CorruptDataError if an encrypted file was cut short."""
        self._descriptor = descriptor
        self._name = name
        head, file_bytes = bytes(_read_at(descriptor, 0, HEAD_BYTES)), os.fstat(descriptor).st_size
        self.is_encrypted = head.startswith(MAGIC)
        self.size_bytes = file_bytes
        if self.is_encrypted:
            self._count = _chunks_count(file_bytes)
            self._cipher = _cipher(key, head)
            self.size_bytes = file_bytes - HEAD_BYTES - TAG_BYTES * self._count

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` from `offset` in order; return the bytes read (short at end of file)."""
        if not self.is_encrypted:
            return _read_into(self._descriptor, offset, buffers)
        size_bytes = sum(buffer.nbytes for buffer in buffers)
        return _scatter(self._plain_from(offset, size_bytes), buffers)

    def close(self) -> None:
        os.close(self._descriptor)

    def _plain_from(self, offset: int, size_bytes: int) -> Iterator[memoryview]:
        """Yield the decrypted content from `offset` on, at least `size_bytes` of it."""
        first, skip = divmod(offset, CHUNK_BYTES)
        end = min(self._count, -(-(offset + size_bytes) // CHUNK_BYTES))
        for start in range(first, end, GULP_CHUNKS):
            numbers = range(start, min(start + GULP_CHUNKS, end))
            at = HEAD_BYTES + start * ENCRYPTED_CHUNK_BYTES
            body = _read_at(self._descriptor, at, len(numbers) * ENCRYPTED_CHUNK_BYTES)
            for place, index in enumerate(numbers):
                chunk = body[place * ENCRYPTED_CHUNK_BYTES :][:ENCRYPTED_CHUNK_BYTES]
                yield memoryview(self._open_chunk(chunk, index))[skip:]
                skip = 0

    def _open_chunk(self, chunk: memoryview, index: int) -> bytes:
        try:
            nonce = _nonce(index, is_last=index == self._count - 1)
            return self._cipher.decrypt(nonce, chunk, None)
        except InvalidTag:
            message = f"{self._name} cannot be decrypted: it is damaged, or of another cluster key"
            raise CorruptDataError(message) from None


def encrypted_parts(key: bytes, parts: Iterable[Part]) -> Iterator[memoryview]:
    """Encrypt `parts` as a file, and yield its pieces; the next piece overwrites the last one."""
    head = MAGIC + secrets.token_bytes(SALT_BYTES)
    yield memoryview(head)
    cipher, index = _cipher(key, head), 0
    gulp = memoryview(bytearray(GULP_CHUNKS * ENCRYPTED_CHUNK_BYTES))
    filled = 0
    for chunk, is_last in _chunks(parts):
        place = gulp[filled : filled + len(chunk) + TAG_BYTES]
        cipher.encrypt_into(_nonce(index, is_last=is_last), chunk, None, place)
        index, filled = index + 1, filled + len(place)
        if is_last or filled == len(gulp):
            yield gulp[:filled]
            filled = 0


def _chunks(parts: Iterable[Part]) -> Iterator[tuple[memoryview, bool]]:
    """Cut consecutive `parts` into chunks, each with whether it is the last, which may be empty.

    A chunk is valid until the next is requested.
    """
    chunk, filled = memoryview(bytearray(CHUNK_BYTES)), 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            if filled == CHUNK_BYTES:  # there is more: it is not the last
                yield chunk, False
                filled = 0
            count = min(len(rest), CHUNK_BYTES - filled)
            chunk[filled : filled + count] = rest[:count]
            rest, filled = rest[count:], filled + count
    yield chunk[:filled], True


def _chunks_count(file_bytes: int) -> int:
    count = -(-(file_bytes - HEAD_BYTES) // ENCRYPTED_CHUNK_BYTES)
    last_bytes = file_bytes - HEAD_BYTES - (count - 1) * ENCRYPTED_CHUNK_BYTES
    if count < 1 or last_bytes < TAG_BYTES:
        message = "an encrypted file has an impossible length"
        raise CorruptDataError(message)
    return count


def _cipher(key: bytes, head: bytes) -> AESGCM:
    """Return the cipher of the file that begins with `head`."""
    salt = head[len(MAGIC) : HEAD_BYTES]
    return AESGCM(blake2b(salt, digest_size=32, key=key, person=b"mf-at-rest-file").digest())


def _nonce(index: int, *, is_last: bool) -> bytes:
    return index.to_bytes(_COUNTER_BYTES, "big") + bytes([is_last])


def _read_at(descriptor: int, offset: int, size_bytes: int) -> memoryview:
    raw = memoryview(bytearray(size_bytes))
    return raw[: _read_into(descriptor, offset, [raw])]


def _read_into(descriptor: int, offset: int, buffers: Sequence[memoryview]) -> int:
    # lseek + readv on a descriptor of our own: preadv is missing on older macOS.
    os.lseek(descriptor, offset, os.SEEK_SET)
    return read_all(descriptor, buffers)


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

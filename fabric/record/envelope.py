"""Envelope of small durable records.

magic | xxh3-128 of the rest | msgpack of the record
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from fabric.codec import unpack
from fabric.errors import CorruptDataError, RejectedError
from fabric.ids import CHECKSUM_BYTES
from fabric.kvcache.hashing import payload_checksum

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Envelope(Generic[T]):
    """One kind of record: its class, its name in messages, its magic and most bytes."""

    kind: type[T]
    what: str
    magic: bytes
    bytes_max: int

    def seal(self, body: bytes) -> bytes:
        """Return a packed record with its magic and checksum."""
        return b"".join((self.magic, payload_checksum([body]), body))

    def open(self, raw: bytes) -> T:
        """Return the record in an envelope; raise CorruptDataError for anything else."""
        lead = len(self.magic) + CHECKSUM_BYTES
        if not lead <= len(raw) <= self.bytes_max or not raw.startswith(self.magic):
            message = f"not a {self.what} of this version"
            raise CorruptDataError(message)
        body = raw[lead:]
        if payload_checksum([body]) != raw[len(self.magic) : lead]:
            message = f"{self.what}'s checksum does not match"
            raise CorruptDataError(message)
        try:
            return unpack(self.kind, body, self.bytes_max)
        except RejectedError as error:
            message = f"{self.what} does not decode: {error.message}"
            raise CorruptDataError(message) from None

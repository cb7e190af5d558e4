"""The outside world as protocols: everything impure enters the pure code through these."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Time; no decision ever uses the wall clock."""

    def monotonic_s(self) -> float:
        """Seconds that never go backwards; only differences mean anything."""
        ...

    def wall_s(self) -> float:
        """Seconds since the epoch, for records that people read."""
        ...


@dataclass(frozen=True, slots=True)
class DriveSpace:
    """Size of a drive, and the space left to write."""

    total_bytes: int
    free_bytes: int


class OpenFile(Protocol):
    """A file that is open for reading."""

    @property
    def size_bytes(self) -> int:
        """Length of the file's content."""
        ...

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill `buffers` in order from `offset`; return the bytes read, fewer at the end."""
        ...


class Disk(Protocol):
    """Directory tree with durable, atomic publish; relative names never contain a client's text."""

    def publish(self, name: str, parts: list[bytes | bytearray | memoryview]) -> None:
        """Write `parts` as the file `name`, atomically and durably; replace an existing file."""
        ...

    def publish_ordered(self, name: str, parts: list[bytes | bytearray | memoryview]) -> None:
        """Publish a file that a power cut may lose until a later publish is durable.

        A later publish never survives without this file.
        """
        ...

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Return the whole file; raise FileNotFoundError, or CorruptDataError over the limit."""
        ...

    def opened(self, name: str) -> AbstractContextManager[OpenFile]:
        """Open a file for several reads; raise FileNotFoundError."""
        ...

    def read_into(self, name: str, offset: int, buffers: list[memoryview]) -> int:
        """Fill `buffers` in order from `offset`; return the bytes read, fewer at the end."""
        ...

    def size_bytes(self, name: str) -> int:
        """Return the file's length; raise FileNotFoundError."""
        ...

    def list_names(self, directory: str) -> list[str]:
        """List file names directly under `directory` (no temporaries), sorted."""
        ...

    def remove(self, name: str) -> bool:
        """Remove a file durably; return whether it existed."""
        ...

    def quarantine(self, name: str, reason: str) -> None:
        """Move a damaged file to the quarantine folder, for inspection."""
        ...

    def drive(self) -> DriveSpace:
        """Return the drive's size and its free space."""
        ...

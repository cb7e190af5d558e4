"""Payload of a block, lent for sending: slices of an open file, readable even once removed."""

import os
from dataclasses import dataclass
from typing import Final, Protocol

from fabric.errors import CorruptDataError

SHORTER: Final = "the block's file is shorter than its record says"


class Payload(Protocol):
    """Bytes of a block; the caller closes it."""

    @property
    def length(self) -> int: ...

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`; raise CorruptDataError where there are fewer bytes, or damaged ones."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenPayload:
    """A block's payload in an open file."""

    descriptor: int
    start: int
    length: int

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill `view`; raise CorruptDataError where the file has fewer bytes.

        Not memory-mapped: a file that shrinks would raise SIGBUS while its MAC is computed.
        """
        if os.preadv(self.descriptor, [view], self.start + offset) != len(view):
            raise CorruptDataError(SHORTER)

    def close(self) -> None:
        os.close(self.descriptor)

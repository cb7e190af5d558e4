"""Staging: bytes from a file to their places, read and checksummed a portion at a time.

The bytes of tokens `a:b` lie in a cache as one run per array and head, 1,536 of them for a block of
an 8B model. A Python call for each would take longer than copying, so a portion of a file is read
into a small buffer and checksummed there by one call each, while it is in the processor's cache,
and copied to its places by one strided copy for each array.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fabric.limits import KIB

PORTION_BYTES: Final = 512 * KIB  # fits the second-level cache of one core

# Writable bytes of any shape and strides, filled in C order.
Place = NDArray[np.uint8]

_buffers = threading.local()


def staging_buffer() -> Place:
    """Return this thread's buffer of PORTION_BYTES; the next call gives the same one."""
    if not hasattr(_buffers, "staging"):
        _buffers.staging = np.zeros(PORTION_BYTES, np.uint8)
    buffer: Place = _buffers.staging
    return buffer


@dataclass(frozen=True, slots=True)
class Portion:
    """Consecutive bytes of a file on their way through this thread's staging buffer."""

    view: memoryview  # to read into
    _places: list[tuple[Place, Place]]  # destinations, each with its staged bytes

    def put_in_place(self) -> None:
        """Copy the bytes read to their destinations."""
        for place, staged in self._places:
            place[...] = staged.reshape(place.shape)


def portions(places: Sequence[Place]) -> Iterator[Portion]:
    """Cut `places` into portions, in order; each is valid until the next is requested."""
    staging = staging_buffer()
    filled: list[tuple[Place, Place]] = []
    end = 0
    for piece in _pieces(places):
        start, end = end, end + piece.nbytes
        if end > PORTION_BYTES:
            yield Portion(staging[:start].data, filled)
            filled, start, end = [], 0, piece.nbytes
        filled.append((piece, staging[start:end]))
    if filled:
        yield Portion(staging[:end].data, filled)


def _pieces(places: Sequence[Place]) -> Iterator[Place]:
    """Cut places into pieces of at most PORTION_BYTES."""
    for place in places:
        if place.nbytes <= PORTION_BYTES:
            if place.nbytes:
                yield place
        elif place.flags.c_contiguous:
            flat = place.reshape(-1)
            for start in range(0, len(flat), PORTION_BYTES):
                yield flat[start : start + PORTION_BYTES]
        else:
            yield from _pieces(list(place))

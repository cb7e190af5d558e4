"""Bytes on their way from a file to their places: through a small buffer, read and checked there.

The bytes of tokens `a:b` lie in a cache as one run per array and head, 1,536 of them for a
block of an 8B model. A scatter read with that many targets, and a checksum of each, costs more
than the copying. So a piece of the file is read whole, checksummed by one call while it is in
the processor's cache, and put in its places by one strided copy for each array.
"""

import threading
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fabric.limits import KIB

STAGING_BYTES: Final = 512 * KIB  # fits the second-level cache of one core

# Writable bytes of any shape and strides, filled in C order.
Place = NDArray[np.uint8]

_buffers = threading.local()


def staging_buffer() -> Place:
    """Return this thread's buffer of STAGING_BYTES; the next call gives the same one."""
    if not hasattr(_buffers, "staging"):
        _buffers.staging = np.zeros(STAGING_BYTES, np.uint8)
    buffer: Place = _buffers.staging
    return buffer


def staged_groups(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Cut `places` into runs that each fit the staging buffer, in order."""
    group: list[Place] = []
    size_bytes = 0
    for piece in _pieces(places):
        if group and size_bytes + piece.nbytes > STAGING_BYTES:
            yield group
            group, size_bytes = [], 0
        group.append(piece)
        size_bytes += piece.nbytes
    if group:
        yield group


def put_in_place(staged: Place, group: Sequence[Place]) -> None:
    """Copy consecutive bytes to where they belong."""
    at = 0
    for place in group:
        end = at + place.nbytes
        place[...] = staged[at:end].reshape(place.shape)
        at = end
    assert at == staged.nbytes, "the group is as long as what was read"


def _pieces(places: Sequence[Place]) -> Iterator[Place]:
    for place in places:
        if place.nbytes <= STAGING_BYTES:
            yield place
        elif place.flags.c_contiguous:
            flat = place.reshape(-1)
            for start in range(0, len(flat), STAGING_BYTES):
                yield flat[start : start + STAGING_BYTES]
        else:
            yield from _pieces(list(place))

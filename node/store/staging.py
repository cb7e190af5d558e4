"""Bytes on their way from a file to their places, read and checksummed a portion at a time.

The bytes of tokens `a:b` lie in a cache as one run per array and head, 1,536 of them for a block of
an 8B model. Long runs (codes: 16 KiB) are read straight to their places. Short ones (scales and
biases: 1 KiB) would cost more calls than copying: they are read into a small buffer together, and
put in their places by one strided copy for each array. A portion is checksummed while it is in the
processor's cache.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fabric.limits import KIB

PORTION_BYTES: Final = 512 * KIB  # fits the second-level cache of one core
DIRECT_RUN_BYTES: Final = 8 * KIB  # a shorter run is staged

# Writable bytes of any shape and strides, filled in C order.
Place = NDArray[np.uint8]

_buffers = threading.local()


def staging_buffer() -> Place:
    """Return this thread's buffer of PORTION_BYTES; the next call gives the same one."""
    if not hasattr(_buffers, "staging"):
        _buffers.staging = np.zeros(PORTION_BYTES, np.uint8)
    buffer: Place = _buffers.staging
    return buffer


@dataclass(slots=True)
class Portion:
    """Consecutive bytes of a file: the buffers to fill in order, and what to copy out of them."""

    buffers: list[Place] = field(default_factory=list)
    size_bytes: int = 0
    _staged_bytes: int = 0
    _run_from: int | None = None  # where in the staging buffer the last of `buffers` begins
    _copies: list[tuple[Place, Place]] = field(default_factory=list)

    def add_runs(self, runs: Sequence[Place], size_bytes: int) -> None:
        """Add contiguous runs, of so many bytes together, that are filled in place."""
        self.buffers += runs
        self.size_bytes += size_bytes
        self._run_from = None

    def stage(self, place: Place) -> None:
        """Add bytes that are copied to their place by `put_in_place`."""
        staging, start = staging_buffer(), self._staged_bytes
        self._staged_bytes += place.nbytes
        self.size_bytes += place.nbytes
        if self._run_from is None:
            self._run_from = start
            self.buffers.append(staging[start : self._staged_bytes])
        else:
            self.buffers[-1] = staging[self._run_from : self._staged_bytes]
        self._copies.append((place, staging[start : self._staged_bytes]))

    def put_in_place(self) -> None:
        """Copy what was staged to where it belongs."""
        for place, staged in self._copies:
            place[...] = staged.reshape(place.shape)


def portions(places: Sequence[Place]) -> Iterator[Portion]:
    """Cut `places` into portions, in order; each is good until the next is asked for."""
    portion = Portion()
    for piece in _pieces(places):
        if portion.buffers and portion.size_bytes + piece.nbytes > PORTION_BYTES:
            yield portion
            portion = Portion()
        runs = _long_runs(piece)
        if runs:
            portion.add_runs(runs, piece.nbytes)
        else:
            portion.stage(piece)
    if portion.buffers:
        yield portion


def _long_runs(piece: Place) -> Sequence[Place]:
    """Return the contiguous runs of a piece; none where they are short, or its parts have gaps."""
    if piece.flags.c_contiguous:
        return [piece.reshape(-1)] if piece.nbytes >= DIRECT_RUN_BYTES else []
    if piece.nbytes < DIRECT_RUN_BYTES * len(piece):
        return []
    runs = list(piece)
    return [run.reshape(-1) for run in runs] if runs[0].flags.c_contiguous else []


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

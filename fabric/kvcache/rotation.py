"""Rotation of a stored key that moves to another position, as data.

A rotary embedding turns pairs of a row's dimensions by (position × frequency), so a row kept
for position p becomes the row for p + d by turning it by d more. Only the turning counts: a
magnitude factor (yarn, longrope) is in the stored row already.

Source: Su et al. 2021, arXiv 2104.09864, section 3.2.2.
"""

from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import TypeAlias

from fabric.errors import RejectedError, require

KEYS, VALUES, INDEX = "keys", "values", "index"
SLOTS = (KEYS, VALUES, INDEX)

_require = partial(require, kind=RejectedError, code="invalid_message")


@dataclass(frozen=True, slots=True)
class Rotation:
    """The turning span of one slot's rows `[..., width]`: dimensions `start` to `start + dims`.

    `traditional` pairs neighbours (0,1), (2,3), else the halves (0, dims/2), (1, dims/2 + 1).
    Exactly one of `base` and `frequencies` is set; `frequencies` are radians per token of each
    pair before `scale`, 0 for a pair that stands still.
    """

    slot: str
    start: int
    dims: int
    traditional: bool
    base: float | None
    scale: float
    frequencies: tuple[float, ...] | None

    def __post_init__(self) -> None:
        """Raise RejectedError if the values do not describe a rotation."""
        _require(self.slot in SLOTS, f"rotation: no slot {self.slot!r:.40}")
        _require(self.start >= 0, "rotation: starts below 0")
        _require(self.dims > 0 and self.dims % 2 == 0, "rotation: dims are not whole pairs")
        _require(isfinite(self.scale), "rotation: scale is not finite")
        _require(
            (self.base is None) != (self.frequencies is None), "rotation: needs base or frequencies"
        )
        if self.base is not None:
            _require(
                isfinite(self.base) and self.base > 0, "rotation: base is not a positive number"
            )
        if self.frequencies is not None:
            _require(
                len(self.frequencies) * 2 == self.dims, "rotation: needs one frequency per pair"
            )
            _require(all(map(isfinite, self.frequencies)), "rotation: a frequency is not finite")

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Dimensions of the stored row that turn together, one pair per frequency."""
        half = self.dims // 2
        if self.traditional:
            return tuple((self.start + 2 * i, self.start + 2 * i + 1) for i in range(half))
        return tuple((self.start + i, self.start + half + i) for i in range(half))


@dataclass(frozen=True, slots=True)
class UnknownRotation:
    """A layer whose rows must not be moved to other positions, and why."""

    reason: str


# One cache's rotations, at most one per slot; empty if its rows fit every position as they are.
CacheRotations: TypeAlias = tuple[Rotation, ...] | UnknownRotation

"""Rotation of stored keys to other positions, for rows that an edit moved.

MLX's Metal kernel adds a row's index and its offset as unsigned numbers, so a backward rotation
passes its distance as a positive offset with a negative scale.
Source: `pos.y + batch_offset` in mlx/backend/metal/kernels/rope.metal, MLX 0.32.

Stored rows never change. Plain keys are rotated when they are fetched. Packed keys stay packed: a
score depends only on the relative rotation of query and key, so `MovedRows` rotates the queries
back instead, once per distance.
Source: q · R(d) k = R(-d) q · k, because a rotation R is orthogonal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import mlx.core as mx

from fabric.kvcache.arrangement import Shift, cut_shifts, shift_runs
from fabric.kvcache.rotation import Rotation


def rotate(array: mx.array, rotation: Rotation, delta: int | Sequence[int] | mx.array) -> mx.array:
    """Shift rows `[..., tokens, width]` by `delta` tokens; the other dimensions keep their bits.

    `delta` may be negative, and may be one integer per token, `[tokens]`. Raise ValueError if
    the rows are narrower than the rotation or the deltas are not one per token.
    """
    start, end = rotation.start, rotation.start + rotation.dims
    if end > array.shape[-1]:
        message = f"rows of {array.shape[-1]} have no dimensions {start} to {end}"
        raise ValueError(message)
    rotated = _rotate_span(array[..., start:end], rotation, delta)
    return mx.concatenate([array[..., :start], rotated, array[..., end:]], axis=-1)


def _rotate_span(
    span: mx.array, rotation: Rotation, delta: int | Sequence[int] | mx.array
) -> mx.array:
    # The kernel counts positions up along the token axis, so each token gets an axis of length 1.
    if isinstance(delta, int):
        rows = span.reshape(1, -1, 1, rotation.dims)
        return _kernel(rows, rotation, abs(delta), is_back=delta < 0).reshape(span.shape)
    offsets = mx.array(delta, mx.int32) if not isinstance(delta, mx.array) else delta
    tokens = span.shape[-2]
    if offsets.shape != (tokens,):
        message = f"{tokens} tokens cannot move by deltas of shape {offsets.shape}"
        raise ValueError(message)
    first = mx.moveaxis(span, -2, 0)
    rows = first.reshape(tokens, -1, 1, rotation.dims)
    if isinstance(delta, mx.array) or max(delta) > 0:
        rows = _kernel(rows, rotation, mx.maximum(offsets, 0), is_back=False)
    if isinstance(delta, mx.array) or min(delta) < 0:
        rows = _kernel(rows, rotation, mx.maximum(-offsets, 0), is_back=True)
    return mx.moveaxis(rows.reshape(first.shape), 0, -2)


def _kernel(
    rows: mx.array, rotation: Rotation, offset: int | mx.array, *, is_back: bool
) -> mx.array:
    # The model's own rope modules would in part apply their magnitude factor again.
    periods = None
    if rotation.frequencies is not None:
        periods = mx.array([1 / f if f else inf for f in rotation.frequencies], mx.float32)
    return mx.fast.rope(
        rows,
        rotation.dims,
        traditional=rotation.traditional,
        base=rotation.base,
        scale=-rotation.scale if is_back else rotation.scale,
        offset=offset,
        freqs=periods,
    )


ROWWISE_RUNS_MIN = 48  # with more runs, rotating each row by its own distance is cheaper on CPU


@dataclass(frozen=True, slots=True)
class MovedRows:
    """Rotation of fetched rows that are shifted from the positions they were computed for."""

    rotation: Rotation
    shifts: tuple[Shift, ...]  # counted from the first fetched row

    def rotate_rows(self, rows: mx.array) -> mx.array:
        """Rotate keys `[batch, heads, tokens, width]` to their current positions."""
        if len(self.shifts) >= ROWWISE_RUNS_MIN:
            deltas = [0] * rows.shape[2]
            for run in self.shifts:
                deltas[run.start : run.end] = [run.delta] * (run.end - run.start)
            return rotate(rows, self.rotation, deltas)
        parts = []
        for run in shift_runs(self.shifts, rows.shape[2]):
            part = rows[:, :, run.start : run.end]
            parts.append(rotate(part, self.rotation, run.delta) if run.delta else part)
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]

    def rotate_queries(
        self, queries: mx.array, tokens_count: int
    ) -> Iterator[tuple[Shift, mx.array]]:
        """Yield every run of rows, with the queries rotated back by its distance."""
        deltas = tuple(dict.fromkeys(shift.delta for shift in self.shifts))
        rotated = {0: queries}
        if deltas:
            back = self.rotate_back(queries, deltas)
            rotated |= {delta: back[..., index, :] for index, delta in enumerate(deltas)}
        for run in shift_runs(self.shifts, tokens_count):
            yield run, rotated[run.delta]

    def rotate_back(self, queries: mx.array, deltas: Sequence[int]) -> mx.array:
        """Rotate `[..., width]` back by each distance, `[..., distances, width]`."""
        if len(deltas) == 1:
            return rotate(queries, self.rotation, -deltas[0])[..., None, :]
        # All at once: on CPU, 64 distances take half the time that they take one by one.
        lead, width = queries.shape[:-1], queries.shape[-1]
        apart = mx.broadcast_to(queries[..., None, :], (*lead, len(deltas), width))
        return rotate(apart, self.rotation, [-delta for delta in deltas])

    def from_row(self, start: int, tokens_count: int) -> "MovedRows":
        """Return the same for the rows from `start` on, counted from there."""
        return replace(self, shifts=cut_shifts(self.shifts, start, tokens_count))

    def last_rows(self, count: int, tokens_count: int) -> "MovedRows | None":
        """Return the same for the last `count` of `tokens_count` rows; None if none was moved."""
        shifts = cut_shifts(self.shifts, max(0, tokens_count - count), tokens_count)
        return replace(self, shifts=shifts) if shifts else None

"""Rows of a slot that were moved, turned on to the positions at which they lie now.

Stored rows stay as they were computed. Plain numbers are turned when they are fetched. Packed
keys are not unpacked for it: a score depends only on how far query and key are turned apart, so
the queries are turned back instead, once per distance.
Source: q · R(d) k = R(-d) q · k, for a rotation R is orthogonal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from fabric.kvcache.rotation import Rotation
from fabric.kvcache.shift import Shift, cut, runs
from node.mlx.rotate import rotate

ROWWISE_RUNS_MIN = 48  # from here on, turning every row by its own distance is cheaper, on CPU


@dataclass(frozen=True, slots=True)
class Turning:
    """Which of the rows that were fetched lie elsewhere than where they were computed."""

    rotation: Rotation
    shifts: tuple[Shift, ...]  # counted from the first row that was fetched

    def of_rows(self, rows: mx.array) -> mx.array:
        """Turn `[batch, heads, tokens, width]` as computed to where they lie."""
        if len(self.shifts) >= ROWWISE_RUNS_MIN:
            deltas = [0] * rows.shape[2]
            for run in self.shifts:
                deltas[run.start : run.end] = [run.delta] * (run.end - run.start)
            return rotate(rows, self.rotation, deltas)
        parts = []
        for run in runs(self.shifts, rows.shape[2]):
            part = rows[:, :, run.start : run.end]
            parts.append(rotate(part, self.rotation, run.delta) if run.delta else part)
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]

    def of_queries(self, queries: mx.array, tokens_count: int) -> Iterator[tuple[Shift, mx.array]]:
        """Yield every run of the rows, with the queries whose scores against it are right."""
        deltas = tuple(dict.fromkeys(shift.delta for shift in self.shifts))
        turned = {0: queries}
        if deltas:
            back = self.back(queries, deltas)
            turned |= {delta: back[..., index, :] for index, delta in enumerate(deltas)}
        for run in runs(self.shifts, tokens_count):
            yield run, turned[run.delta]

    def back(self, queries: mx.array, deltas: Sequence[int]) -> mx.array:
        """Turn `[..., width]` back by each distance, `[..., distances, width]`."""
        if len(deltas) == 1:
            return rotate(queries, self.rotation, -deltas[0])[..., None, :]
        # All of them at once: on CPU 64 distances took half the time that they took one by one.
        lead, width = queries.shape[:-1], queries.shape[-1]
        apart = mx.broadcast_to(queries[..., None, :], (*lead, len(deltas), width))
        return rotate(apart, self.rotation, [-delta for delta in deltas])

    def behind(self, start: int, tokens_count: int) -> "Turning":
        """Return how the rows from `start` on turn, counted from there."""
        return replace(self, shifts=cut(self.shifts, start, tokens_count))

    def of_last(self, count: int, tokens_count: int) -> "Turning | None":
        """Return how the last `count` of `tokens_count` rows turn, if any of them was moved."""
        shifts = cut(self.shifts, max(0, tokens_count - count), tokens_count)
        return replace(self, shifts=shifts) if shifts else None

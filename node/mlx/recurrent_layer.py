"""A recurrent layer, whose state arrays summarize the past and cannot be cut.

Steps replace the arrays and never write into them, so a snapshot is a list of references.
Sequences that decode together are rows of one stack, which is built when the batch changes
and not in every step; a sequence copies its row out when it leaves the batch.
"""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

Snapshot = list[mx.array]


@dataclass(frozen=True, slots=True)
class Mark:
    """A state to restore: whole arrays, and the row of the sequence."""

    arrays: Snapshot
    row: int | None

    def snapshot(self) -> Snapshot:
        """Return the marked state as separate arrays."""
        if self.row is None:
            return self.arrays
        row = mx.array([self.row])
        return [mx.take(array, row, axis=0) for array in self.arrays]


class RecurrentLayer(ArraysCache):
    """Resident state of one recurrent layer; alone it is a list of arrays `[1, …]`."""

    def __init__(self, states: Snapshot) -> None:
        super().__init__(len(states))
        self.cache = list(states)
        self.stack: StackedState | None = None
        self.row = 0

    def leave_batch(self) -> None:
        """Leave the stack with a copy of this sequence's row."""
        if self.stack is not None:
            row = mx.array([self.row])
            self.cache = [mx.take(array, row, axis=0) for array in self.stack.cache]
            self.stack = None

    def snapshot(self) -> Snapshot:
        """Return the current state as immutable arrays."""
        self.leave_batch()
        return list(self.cache)

    def replace(self, states: Snapshot) -> None:
        self.stack = None
        self.cache = list(states)

    def mark(self) -> Mark:
        """Return a mark of the current state, without copying it."""
        if self.stack is None:
            return Mark(list(self.cache), None)
        return Mark(list(self.stack.cache), self.row)

    def undo(self, mark: Mark) -> None:
        self.replace(mark.snapshot())

    @property
    def nbytes(self) -> int:
        """Bytes of this sequence's own state."""
        stack = self.stack  # another thread may leave the stack meanwhile
        if stack is None:
            return sum(int(array.nbytes) for array in self.cache)
        return sum(int(array.nbytes) // array.shape[0] for array in stack.cache)


class StackedState(ArraysCache):
    """One recurrent layer of several sequences; the model replaces its arrays."""

    def __init__(self, layers: list[RecurrentLayer]) -> None:
        super().__init__(len(layers[0].cache))
        states = [layer.snapshot() for layer in layers]
        self.cache = [mx.concatenate(list(rows)) for rows in zip(*states, strict=True)]
        self._count = len(layers)
        for row, layer in enumerate(layers):
            layer.stack, layer.row = self, row

    def is_of(self, layers: list[RecurrentLayer]) -> bool:
        """Return whether these layers, in this order, are the rows of the stack."""
        return len(layers) == self._count and all(
            layer.stack is self and layer.row == row for row, layer in enumerate(layers)
        )


def stack(layers: list[RecurrentLayer]) -> StackedState:
    """Return the stack of these sequences, which may exist already."""
    present = layers[0].stack
    if present is not None and present.is_of(layers):
        return present
    return StackedState(layers)

"""Lengths that one agent's sketch had, so that a list sends only what was added.

change   3   9  14         each: from this change on, the sketch had so many pieces,
pieces   2   5   8         and each is a beginning of the next
"""

from collections.abc import Sequence
from itertools import takewhile

from node.limits import SKETCH_LENGTHS_MAX


class SketchHistory:
    """Last lengths of a sketch that only grew, each with the change that caused it."""

    def __init__(self) -> None:
        self._sketch: Sequence[int] = ()
        self._last = 0
        self._lengths: tuple[tuple[int, int], ...] = ()

    def note(self, sketch: Sequence[int], change: int) -> None:
        """Record an agent's sketch at a change of the agent."""
        if sketch is self._sketch and self._lengths:
            return
        before, self._sketch = len(self._sketch), sketch
        # Hashes are chained: one piece tells whether all before it are the same.
        grew = 0 < before <= len(sketch) and sketch[before - 1] == self._last
        lengths = self._lengths[1 - SKETCH_LENGTHS_MAX :] if grew else ()
        self._last = sketch[-1] if sketch else 0
        self._lengths = (*lengths, (change, len(sketch)))

    def kept_pieces(self, sketch: Sequence[int], change: int) -> int:
        """Return the number of pieces that a sketch has had since `change`; 0 if unknown.

        A sketch that is not noted yet, as its change is still being stored, is unknown.
        """
        if sketch is not self._sketch:
            return 0
        lengths = takewhile(lambda length: length[0] <= change, self._lengths)
        return max((pieces for _, pieces in lengths), default=0)

"""Arrangement of a resident cache: the tokens in place, holes, and moved tokens.

    in place   0 ...... tokens_count [ hole )[ ahead ........ )[ hole )[ ahead )

Holes are computed in order; once one is filled, the tokens after it count as well.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fabric.kvcache.shift import Shift, cut, joined, runs

Range = tuple[int, int]  # of tokens: the first, and the one after the last


@dataclass(frozen=True, slots=True)
class Move:
    """Tokens `start:end` of a cache go to `new_start` as they are."""

    start: int
    end: int
    new_start: int

    @property
    def new_end(self) -> int:
        """Position after the last one, at the new place."""
        return self.new_start + self.end - self.start


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The first `tokens_count` tokens, others `ahead`, and how far all lie from their places."""

    tokens_count: int
    ahead: tuple[Range, ...]
    shifts: tuple[Shift, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range], shifts: Iterable[Shift]) -> "Arrangement":
        """Describe what is in place in these ranges, which may adjoin or be empty."""
        held, far = _joined(ranges), joined(shifts)
        assert _are_ascending(held), "ranges are in order"
        assert _are_ascending((s.start, s.end) for s in far), "shifts are in order"
        assert _are_within(far, held), "only what is in place was moved"
        count = held[0][1] if held and held[0][0] == 0 else 0
        return cls(count, held[1:] if count else held, far)

    @property
    def end(self) -> int:
        """Position after the last token in place."""
        return self.ahead[-1][1] if self.ahead else self.tokens_count

    def after(self, moves: Sequence[Move]) -> "Arrangement":
        """Return it with tokens moved and all others gone; moved back, they are in place again."""
        moves = [move for move in moves if move.start != move.end]
        assert _are_ascending((m.start, m.end) for m in moves), "moves keep the tokens' order"
        held = _joined([(0, self.tokens_count), *self.ahead])
        assert _are_within(moves, held), "only what is in place can be moved"
        places = [(move.new_start, move.new_end) for move in moves]
        return Arrangement.of(places, (s for move in moves for s in self._shifts_after(move)))

    def _shifts_after(self, move: Move) -> Iterable[Shift]:
        by = move.new_start - move.start
        for run in runs(cut(self.shifts, move.start, move.end), move.end - move.start):
            yield Shift(run.start + move.new_start, run.end + move.new_start, run.delta + by)


def _joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Leave out empty ranges and join neighbours."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start != end:
            merged.append((start, end))
    return tuple(merged)


def _are_ascending(ranges: Iterable[Range]) -> bool:
    """Return whether none is empty, and each begins where the one before ends, or later."""
    at = 0
    for start, end in ranges:
        if not at <= start < end:
            return False
        at = end
    return True


def _are_within(tokens: Iterable[Shift | Move], ranges: Sequence[Range]) -> bool:
    return all(any(start <= t.start and t.end <= end for start, end in ranges) for t in tokens)

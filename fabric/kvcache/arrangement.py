"""Layout of a resident cache's rows: valid tokens, holes, moved rows, and sliding-window blocks.

`Arrangement`: which tokens are valid. Holes are computed in order; once a hole is filled, the
tokens after it (`ahead`) become valid too.

    valid      0 ...... tokens_count [ hole )[ ahead ........ )[ hole )[ ahead )

`Shift`: rows that an edit moved. Their bytes stay unchanged; attention rotates them by `delta`
(`Rotation`) when it reads, so moving rows back and forth loses no precision.

    computed   0 ....... 300 ....... 700 ...... 1000
    edited     0 ....... 300 ...... 600                 300:700 removed: Shift(300, 600, -400)

`WindowGrid`: where blocks of window layers start. A token computed after the ahead rows attends
to one window before it, so window rows are stored before each hole and before the end.

    cache   0 .......... exact ...(moved)... [ hole )(ahead)[ hole )(ahead) head ........
    blocks  [ 256 )[ 256 )          none     [256)[rest)     [rest)        [ 256 )[ 256 )
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec
from fabric.limits import AGENT_TOKENS_MAX, BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Shift:
    """Tokens `start:end` of a cache moved by `delta` positions from where they were computed."""

    start: int
    end: int
    delta: int  # negative: before


def joined(shifts: Iterable[Shift]) -> tuple[Shift, ...]:
    """Leave out tokens in their own places, and join neighbours that are equally far from them."""
    merged: list[Shift] = []
    for shift in shifts:
        if shift.start == shift.end or not shift.delta:
            continue
        last = merged[-1] if merged else None
        if last is not None and (last.end, last.delta) == (shift.start, shift.delta):
            merged[-1] = Shift(last.start, shift.end, shift.delta)
        else:
            merged.append(shift)
    return tuple(merged)


def cut(shifts: tuple[Shift, ...], start: int, end: int) -> tuple[Shift, ...]:
    """Return what there is of them in `start:end`, counted from `start` on."""
    if not shifts or (start == 0 and shifts[-1].end <= end):  # most often
        return shifts
    return tuple(
        Shift(max(s.start, start) - start, min(s.end, end) - start, s.delta)
        for s in shifts
        if max(s.start, start) < min(s.end, end)
    )


def runs(shifts: Iterable[Shift], tokens_count: int) -> Iterator[Shift]:
    """Yield all of `tokens_count` tokens in order: shifts, and what is in place as delta 0."""
    at = 0
    for shift in shifts:
        if at < shift.start:
            yield Shift(at, shift.start, 0)
        yield shift
        at = shift.end
    if at < tokens_count:
        yield Shift(at, tokens_count, 0)


def why_unshiftable(spec: ModelCacheSpec) -> str:
    """Return why rows of such a cache must stay where they were computed; "" if they need not."""
    if not spec.layers:
        return "nothing is known of the model's caches"
    return next((why for why in map(_why_unshiftable, spec.layers) if why), "")


def _why_unshiftable(layer: LayerSpec) -> str:
    if layer.kind is LayerKind.RECURRENT:
        return "recurrent layers keep all tokens in one state, of which none can be taken out"
    if layer.is_chunked:
        return "layers of chunks see back to places that do not move"
    return layer.rotations_unknown


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


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """Positions at which blocks of a cache start.

    They have 256 tokens before `exact_tokens` and in each computed range. Rows of computed ranges
    are stored as they slide away; all others are parts of older blocks.
    """

    exact_tokens: int
    computed_ranges: tuple[Range, ...]

    def block_start(self, position: int) -> int:
        """Return the start of the block of a token; for a moved token, its own position."""
        if position < self.exact_tokens:
            return position // BLOCK_TOKENS * BLOCK_TOKENS
        for start, end in reversed(self.computed_ranges):
            if start <= position < end:
                return position - (position - start) % BLOCK_TOKENS
        return position

    def blocks(self, first: int, until: int) -> Iterator[Range]:
        """Yield blocks of computed ranges that start at `first` or later and end by `until`."""
        for start, end in self.computed_ranges:
            skipped = max(0, -(-(first - start) // BLOCK_TOKENS))
            for at in range(start + skipped * BLOCK_TOKENS, min(end, until), BLOCK_TOKENS):
                block_end = min(at + BLOCK_TOKENS, end)
                if block_end <= until:
                    yield at, block_end

    def needed_from(self, tokens_count: int, window_tokens: int) -> int:
        """Return the first row that is held for a token at `tokens_count`.

        Its block is not full yet, or will be stored as a whole: so none is held in part.
        """
        first = max(0, tokens_count - window_tokens + 1)
        return self.block_start(min(first, tokens_count))

    def needed(self, arrangement: Arrangement, window_tokens: int) -> tuple[Range, ...]:
        """Return the rows that must be there: before the next token, and before each hole.

        One range for the beginning and one for each that lies ahead; none is needed of a hole.
        """
        count = arrangement.tokens_count
        ranges = [(self.needed_from(count, window_tokens), count)]
        for start, end in arrangement.ahead:
            ranges.append((max(start, self.needed_from(end, window_tokens)), end))
        return tuple(ranges)


UNEDITED_GRID: Final = WindowGrid(0, ((0, AGENT_TOKENS_MAX),))

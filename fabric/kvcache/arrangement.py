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
    """Tokens `start:end` of a cache, `delta` positions away from where they were computed."""

    start: int
    end: int
    delta: int  # negative: moved to the front


def merge_shifts(shifts: Iterable[Shift]) -> tuple[Shift, ...]:
    """Drop empty shifts and shifts by 0, and merge adjacent shifts with the same delta."""
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


def cut_shifts(shifts: tuple[Shift, ...], start: int, end: int) -> tuple[Shift, ...]:
    """Return the shifts of the tokens `start:end`, counted from `start`."""
    if not shifts or (start == 0 and shifts[-1].end <= end):  # the common case
        return shifts
    return tuple(
        Shift(max(s.start, start) - start, min(s.end, end) - start, s.delta)
        for s in shifts
        if max(s.start, start) < min(s.end, end)
    )


def shift_runs(shifts: Iterable[Shift], tokens_count: int) -> Iterator[Shift]:
    """Yield runs that cover all `tokens_count` tokens in order; unmoved ones have delta 0."""
    at = 0
    for shift in shifts:
        if at < shift.start:
            yield Shift(at, shift.start, 0)
        yield shift
        at = shift.end
    if at < tokens_count:
        yield Shift(at, tokens_count, 0)


def unshiftable_reason(spec: ModelCacheSpec) -> str:
    """Return the reason why rows of a model's caches cannot be moved; "" if they can."""
    if not spec.layers:
        return "the layout of the model's caches is unknown"
    return next((why for why in map(_find_unshiftable_reason, spec.layers) if why), "")


def _find_unshiftable_reason(layer: LayerSpec) -> str:
    if layer.kind is LayerKind.RECURRENT:
        return "recurrent layers keep all tokens in one state, from which none can be removed"
    if layer.is_chunked:
        return "layers of chunks attend from chunk boundaries, which do not move with the tokens"
    return layer.rotations_unknown


Range = tuple[int, int]  # of tokens: the first, and the one after the last


@dataclass(frozen=True, slots=True)
class Move:
    """Move of the tokens `start:end` of a cache to `new_start`, unchanged."""

    start: int
    end: int
    new_start: int

    @property
    def new_end(self) -> int:
        """Position after the last token, after the move."""
        return self.new_start + self.end - self.start


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Valid tokens of a cache: the first `tokens_count`, ranges `ahead` of holes, and shifts."""

    tokens_count: int
    ahead: tuple[Range, ...]
    shifts: tuple[Shift, ...]

    @classmethod
    def of(cls, ranges: Iterable[Range], shifts: Iterable[Shift]) -> "Arrangement":
        """Return the arrangement with valid tokens in `ranges`, which may adjoin or be empty."""
        valid, moved = _merge_ranges(ranges), merge_shifts(shifts)
        assert _are_ascending(valid), "ranges are in order"
        assert _are_ascending((s.start, s.end) for s in moved), "shifts are in order"
        assert _are_within(moved, valid), "only valid tokens have shifts"
        count = valid[0][1] if valid and valid[0][0] == 0 else 0
        return cls(count, valid[1:] if count else valid, moved)

    @property
    def end(self) -> int:
        """Position after the last valid token."""
        return self.ahead[-1][1] if self.ahead else self.tokens_count

    def after(self, moves: Sequence[Move]) -> "Arrangement":
        """Return the arrangement after `moves`; tokens that no move covers are dropped."""
        moves = [move for move in moves if move.start != move.end]
        assert _are_ascending((m.start, m.end) for m in moves), "moves keep the tokens' order"
        valid = _merge_ranges([(0, self.tokens_count), *self.ahead])
        assert _are_within(moves, valid), "only valid tokens can be moved"
        places = [(move.new_start, move.new_end) for move in moves]
        return Arrangement.of(places, (s for move in moves for s in self._shifts_after(move)))

    def _shifts_after(self, move: Move) -> Iterable[Shift]:
        by = move.new_start - move.start
        for run in shift_runs(cut_shifts(self.shifts, move.start, move.end), move.end - move.start):
            yield Shift(run.start + move.new_start, run.end + move.new_start, run.delta + by)


def _merge_ranges(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Drop empty ranges and merge adjacent ones."""
    merged: list[Range] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start != end:
            merged.append((start, end))
    return tuple(merged)


def _are_ascending(ranges: Iterable[Range]) -> bool:
    """Return whether no range is empty, and each starts at or after the end of the one before."""
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
    """Positions at which the blocks of a cache start.

    Blocks have 256 tokens before `exact_tokens` and within each computed range. Rows of computed
    ranges are stored when they leave the window; all other rows are parts of older blocks.
    """

    exact_tokens: int
    computed_ranges: tuple[Range, ...]

    def block_start(self, position: int) -> int:
        """Return the start of the block that contains a token; a moved token starts its own."""
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
        """Return the first row to hold in memory for a token at `tokens_count`.

        It is the start of a block, since blocks are stored whole.
        """
        first = max(0, tokens_count - window_tokens + 1)
        return self.block_start(min(first, tokens_count))

    def needed(self, arrangement: Arrangement, window_tokens: int) -> tuple[Range, ...]:
        """Return the window rows to hold in memory: before the next token, and before each hole.

        Returns one range for the beginning, and one for each range `ahead`.
        """
        count = arrangement.tokens_count
        ranges = [(self.needed_from(count, window_tokens), count)]
        for start, end in arrangement.ahead:
            ranges.append((max(start, self.needed_from(end, window_tokens)), end))
        return tuple(ranges)


UNEDITED_GRID: Final = WindowGrid(0, ((0, AGENT_TOKENS_MAX),))

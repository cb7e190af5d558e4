"""Find the runs of a prompt that other records contain, verified token by token.

The index gives hints only. Around each place where it lists a chunk of a record, the tokens
themselves are compared, as far as they agree.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fabric.kvcache.arrangement import Range
from fabric.limits import EDIT_SINK_TOKENS, SPANS_MAX
from fabric.turn.chunks import Tokens, common_tokens

Source = TypeVar("Source", bound=Hashable)


@dataclass(frozen=True, slots=True)
class ChunkPlaces(Generic[Source]):
    """A chunk of a prompt, and the places where the index lists it."""

    start: int
    end: int
    places: tuple[tuple[Source, int], ...]


@dataclass(frozen=True, slots=True)
class SameRun(Generic[Source]):
    """Run of tokens: `start:end` of a record equals the prompt from `new_start` on."""

    source: Source
    start: int
    end: int
    new_start: int

    @property
    def tokens_count(self) -> int:
        """Number of tokens."""
        return self.end - self.start

    @property
    def new_end(self) -> int:
        """Position in the prompt after the last token."""
        return self.new_start + self.tokens_count

    def without_first(self, tokens_count: int) -> "SameRun[Source]":
        """Return the run without its first tokens."""
        start, new_start = self.start + tokens_count, self.new_start + tokens_count
        return SameRun(self.source, start, self.end, new_start)


def same_runs(
    prompt: Tokens,
    gaps: Sequence[Range],
    chunks: Sequence[ChunkPlaces[Source]],
    tokens_of: Mapping[Source, Tokens],
    tokens_min: int,
) -> list[SameRun[Source]]:
    """List the longest runs within the gaps of a prompt, in order, without overlaps.

    A record's first tokens, to which all others attend, are in no run.
    """
    runs: list[SameRun[Source]] = []
    covered_end = 0
    for start, end in gaps:
        covered_end = max(covered_end, start)
        for chunk in chunks:
            if chunk.end <= covered_end or chunk.start >= end:
                continue
            best = _longest(prompt, (covered_end, end), chunk, tokens_of)
            if best is not None and best.tokens_count >= tokens_min:
                runs.append(best)
                covered_end = best.new_end
    longest = sorted(runs, key=lambda run: run.tokens_count, reverse=True)[:SPANS_MAX]
    return sorted(longest, key=lambda run: run.new_start)


def _longest(
    prompt: Tokens, room: Range, chunk: ChunkPlaces[Source], tokens_of: Mapping[Source, Tokens]
) -> SameRun[Source] | None:
    runs = []
    for source, start in chunk.places:
        tokens = tokens_of[source]
        at = max(chunk.start, room[0], chunk.start + EDIT_SINK_TOKENS - start)
        place = start + at - chunk.start
        forward = common_tokens(prompt[at : room[1]], tokens[place:])
        if not forward:
            continue
        backward = common_tokens(prompt[room[0] : at][::-1], tokens[EDIT_SINK_TOKENS:place][::-1])
        runs.append(SameRun(source, place - backward, place + forward, at - backward))
    return max(runs, key=lambda run: run.tokens_count, default=None)

"""Content of conversations as chained hashes of pieces, without any text.

    segment   a message: its number and its tokens; equal numbers mean equal text
    piece     up to PIECE_TOKENS of a segment; its hash includes all pieces before it

So two contents agree on exactly their common pieces, as sketches and block hashes do.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

from fabric.limits import SKETCH_PIECE_BYTES
from fabric.turn.sketch import common_pieces

Segment = NewType("Segment", int)

BYTES_PER_TOKEN = 4  # of text, as the router estimates it
PIECE_TOKENS = SKETCH_PIECE_BYTES // BYTES_PER_TOKEN
_MASK = (1 << 64) - 1


def mixed(one: int, other: int) -> int:
    """Return a 64-bit hash of two numbers, equal in every process."""
    number = (one * 0x9E3779B97F4A7C15 + other + 0x632BE59BD9B4E019) & _MASK
    number = ((number ^ (number >> 31)) * 0xBF58476D1CE4E5B9) & _MASK
    return number ^ (number >> 29)


def segment(*numbers: int) -> Segment:
    """Return the segment that these numbers name."""
    name = 1
    for number in numbers:
        name = mixed(name, number)
    return Segment(name)


class ContentChain:
    """Pieces of a conversation and the tokens up to the end of each; it only grows."""

    __slots__ = ("ends", "pieces")

    def __init__(self) -> None:
        self.pieces = array("Q")
        self.ends = array("L")

    @property
    def tokens(self) -> int:
        return self.ends[-1] if self.ends else 0

    def append(self, name: Segment, tokens: int) -> None:
        """Add a message of `tokens`."""
        pieces, ends = self.pieces, self.ends
        end, last = self.tokens, pieces[-1] if pieces else 0
        left_tokens = tokens
        while left_tokens > 0:
            size = min(left_tokens, PIECE_TOKENS)
            end += size
            left_tokens -= size
            last = mixed(last, name + left_tokens)
            pieces.append(last)
            ends.append(end)

    def extend(self, parts: Iterable[tuple[Segment, int]]) -> None:
        """Add several messages."""
        for name, tokens in parts:
            self.append(name, tokens)


@dataclass(frozen=True, slots=True)
class Extent:
    """Leading pieces of a content: a prompt, or what a node has cached of a conversation."""

    content: ContentChain
    count: int

    @classmethod
    def of(cls, content: ContentChain) -> "Extent":
        """Return all that the content has so far."""
        return cls(content, len(content.pieces))

    @property
    def pieces(self) -> Sequence[int]:
        return self.content.pieces[: self.count]

    @property
    def tokens(self) -> int:
        return self.content.ends[self.count - 1] if self.count else 0

    @property
    def last(self) -> int:
        """Hash of the last piece, and so of all; 0 of nothing."""
        return self.content.pieces[self.count - 1] if self.count else 0

    def common_count(self, other: "Extent") -> int:
        """Return how many leading pieces both have."""
        if self.content is other.content:
            return min(self.count, other.count)
        most = min(self.count, other.count)
        return common_pieces(self.content.pieces, other.content.pieces, most)

    def tokens_of(self, count: int) -> int:
        """Return the tokens of the leading `count` pieces."""
        return self.content.ends[count - 1] if count else 0

    def count_within(self, tokens: int) -> int:
        """Return how many leading pieces lie within `tokens`."""
        return min(self.count, bisect_right(self.content.ends, tokens))

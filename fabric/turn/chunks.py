"""Cut tokens into chunks by their content, so that shared text is cut the same way in both.

    one     |user| the river is wide ... | and the stone is ... |end|
    other   |user| first of all: the | river is wide ... | and the stone is ... |end|
                                                           ------ same chunk ------

A chunk begins at a special token, or where a hash of the preceding tokens has a given remainder.
So soon after a difference the cuts agree again, however far the text has moved. Source: LBFS
(Muthitacharoen et al.).
"""

from collections.abc import Collection, Sequence
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fabric.limits import SPAN_CHUNK_TOKENS_MAX, SPAN_CHUNK_TOKENS_MIN

Tokens: TypeAlias = NDArray[np.uint32]

_WINDOW: Final = 8  # tokens that a cut depends on; fewer than the shortest chunk has
_ONE_IN: Final = 32  # tokens is a cut, on average
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_STEP: Final = np.uint64(0xD6E8FEB86659FD93)
_HIGH: Final = np.uint64(40)
DIGEST_BYTES: Final = 16
_STRIDE: Final = 4_096  # tokens compared at once: most hints lead to fewer


def as_tokens(ids: Sequence[int]) -> Tokens:
    """Return token ids as an array."""
    return np.fromiter(ids, np.uint32, len(ids))


def common_tokens(one: Tokens, other: Tokens) -> int:
    """Count the leading tokens that both share."""
    count = min(len(one), len(other))
    for at in range(0, count, _STRIDE):
        differs = one[at : min(at + _STRIDE, count)] != other[at : min(at + _STRIDE, count)]
        if differs.any():
            return at + int(np.argmax(differs))
    return count


def chunks(tokens: Tokens, cuts: Collection[int]) -> list[tuple[int, int]]:
    """Return the ranges of the chunks that are long enough; `cuts` are the special tokens."""
    count = len(tokens)
    specials = np.flatnonzero(np.isin(tokens, np.fromiter(cuts, np.uint32, len(cuts))))
    ends = [*map(int, specials), count]
    places = np.flatnonzero(_rolling_hashes(tokens) % _ONE_IN == 0)
    ranges: list[tuple[int, int]] = []
    start = 0
    for end in ends:
        while end - start >= SPAN_CHUNK_TOKENS_MIN:
            at = _cut(places, start, end)
            ranges.append((start, at))
            start = at
        start = end
    return ranges


def _cut(places: "NDArray[np.intp]", start: int, end: int) -> int:
    """Return where the chunk that begins at `start` ends."""
    first = int(np.searchsorted(places, start + SPAN_CHUNK_TOKENS_MIN))
    last = min(end, start + SPAN_CHUNK_TOKENS_MAX)
    return min(int(places[first]), last) if first < len(places) else last


def _rolling_hashes(tokens: Tokens) -> "NDArray[np.uint64]":
    """Return for each token a hash of the tokens just before it."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(29)
    rolled = np.zeros(len(tokens), np.uint64)
    for back in range(_WINDOW, 0, -1):
        rolled *= _STEP
        rolled[back:] += mixed[: len(tokens) - back] if back < len(tokens) else 0
    return rolled >> _HIGH


def chunk_digest(salt: bytes, tokens: Tokens) -> bytes:
    """Return a chunk's digest, keyed by its tenant's salt."""
    return blake2b(
        tokens.tobytes(), digest_size=DIGEST_BYTES, key=salt, person=b"mf-chunk-v1"
    ).digest()

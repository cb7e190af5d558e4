"""Align the tokens of a message with an edited version of it.

    old   a a a a b b c c c c c d d e e e e
    new   a a a a x   c c c c c     e e e e      kept: a, c and e

Runs that occur once in both are the anchors, as in `alignment.py`; between them, runs that occur
once there, and their equal neighbours. The work is arithmetic on arrays, in at most three passes:
100k tokens take a third of a second, whatever they are.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from fabric.limits import EDIT_KEPT_TOKENS_MIN
from fabric.turn.alignment import Run, ascending
from fabric.turn.chunks import Tokens, common_tokens

_LEVELS: Final = 3  # of anchors between anchors; each level looks at all remaining tokens
_FACTOR: Final = np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no token's bits are lost


def aligned_tokens(old: Sequence[int], new: Sequence[int]) -> list[Run]:
    """List runs of at least `EDIT_KEPT_TOKENS_MIN` tokens that both have, ascending in both."""
    a, b = np.asarray(old, np.uint32), np.asarray(new, np.uint32)
    runs: list[Run] = []
    for run in _between(a, b, 0, 0, _LEVELS):
        last = runs[-1] if runs else None
        if last is not None and (last.old_end, last.new_end) == (run.old, run.new):
            runs[-1] = Run(last.old, last.new, last.count + run.count)
        else:
            runs.append(run)
    return [run for run in runs if run.count >= EDIT_KEPT_TOKENS_MIN]


def _between(a: Tokens, b: Tokens, old: int, new: int, levels: int) -> Iterator[Run]:
    """Yield the runs that both have, also short ones; `a` starts at `old`, `b` at `new`."""
    ahead = common_tokens(a, b)
    if ahead:
        yield Run(old, new, ahead)
    a, b, old, new = a[ahead:], b[ahead:], old + ahead, new + ahead
    behind = common_tokens(a[::-1], b[::-1])
    a_end, b_end = len(a) - behind, len(b) - behind
    if levels and min(a_end, b_end) >= EDIT_KEPT_TOKENS_MIN:
        anchors = _anchors(a[:a_end], b[:b_end])
        edges = [Run(0, 0, 0), *anchors, Run(a_end, b_end, 0)]
        for before, after in pairwise(edges) if anchors else ():
            start, new_start = before.old_end, before.new_end
            within = a[start : after.old], b[new_start : after.new]
            yield from _between(*within, old + start, new + new_start, levels - 1)
            if after.count:
                yield Run(old + after.old, new + after.new, after.count)
    if behind:
        yield Run(old + a_end, new + b_end, behind)


def _anchors(a: Tokens, b: Tokens) -> list[Run]:
    """Return the runs that occur once in each, as many as ascend in both."""
    sums, others = _sums(a), _sums(b)
    places, new_places = _once(sums), _once(others)
    _, at, new_at = np.intersect1d(
        sums[places], others[new_places], assume_unique=True, return_indices=True
    )
    pairs = sorted(zip(places[at].tolist(), new_places[new_at].tolist(), strict=True))
    found: list[Run] = []
    for place, new_place in ascending(pairs):
        last = found[-1] if found else Run(0, 0, 0)
        skipped = max(0, last.old_end - place, last.new_end - new_place)
        count = EDIT_KEPT_TOKENS_MIN - skipped
        start, new_start = place + skipped, new_place + skipped
        if count <= 0:
            continue
        if (last.old_end, last.new_end) == (start, new_start) and last.count:
            found[-1] = Run(last.old, last.new, last.count + count)
        else:
            found.append(Run(start, new_start, count))
    return [run for run in found if _is_equal(a, b, run)]


def _sums(tokens: Tokens) -> npt.NDArray[np.uint64]:
    """Return a hash of each run of `EDIT_KEPT_TOKENS_MIN` tokens."""
    count = len(tokens) - EDIT_KEPT_TOKENS_MIN + 1
    wide = tokens.astype(np.uint64)
    sums = np.zeros(count, np.uint64)
    for at in range(EDIT_KEPT_TOKENS_MIN):
        sums = (sums + wide[at : at + count] + np.uint64(1)) * _FACTOR
        sums ^= sums >> np.uint64(29)
    return sums


def _once(sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    """Return the places of the hashes that occur once."""
    _, places, counts = np.unique(sums, return_index=True, return_counts=True)
    once: npt.NDArray[np.intp] = places[counts == 1]
    return once


def _is_equal(a: Tokens, b: Tokens, run: Run) -> bool:
    """Return whether the tokens are equal, and not only their hashes."""
    return bool(np.array_equal(a[run.old : run.old_end], b[run.new : run.new_end]))

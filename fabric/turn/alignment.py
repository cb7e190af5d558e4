"""Alignment of an older and a newer text: the runs of chunks that both have, in the same order.

Anchors are chunks that occur exactly once in each text; equal chunks around an anchor extend its
run. So a moved or repeated chunk affects no other chunk, and the time is that of sorting.
Source: Bram Cohen's patience diff.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar


@dataclass(frozen=True, slots=True)
class Run:
    """Run of `count` equal chunks, at `old` in the older text and at `new` in the newer one."""

    old: int
    new: int
    count: int

    @property
    def old_end(self) -> int:
        """Index of the chunk after the run in the older text."""
        return self.old + self.count

    @property
    def new_end(self) -> int:
        """Index of the chunk after the run in the newer text."""
        return self.new + self.count


def align_chunks(old: list[bytes], new: list[bytes]) -> list[Run]:
    """List the runs that both texts have, ascending in both and as long as possible."""
    pairs = longest_ascending(list(_unique_pairs(old, new)))
    runs: list[Run] = []
    edges = [(-1, -1), *pairs, (len(old), len(new))]
    for (a, b), (c, d) in pairwise(edges):
        prefix = common_prefix(old[max(a, 0) : c], new[max(b, 0) : d])
        if prefix:
            add_run(runs, Run(max(a, 0), max(b, 0), prefix))
        gap_chunks = min(c - max(a, 0), d - max(b, 0)) - prefix
        suffix = (
            common_prefix(old[c - gap_chunks : c][::-1], new[d - gap_chunks : d][::-1])
            if gap_chunks
            else 0
        )
        if suffix:
            add_run(runs, Run(c - suffix, d - suffix, suffix))
    return runs


def _unique_pairs(old: Sequence[bytes], new: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    counts, new_counts = Counter(old), Counter(new)
    places = {chunk: at for at, chunk in enumerate(new) if new_counts[chunk] == 1}
    for at, chunk in enumerate(old):
        if counts[chunk] == 1 and chunk in places:
            yield at, places[chunk]


def longest_ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the longest subsequence of `pairs` that ascends in both numbers.

    `pairs` ascend in the first number already.
    """
    tails: list[int] = []  # by length: the smallest last number of any subsequence
    at_tail: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(pairs):
        length = bisect_left(tails, place)
        before.append(at_tail[length - 1] if length else -1)
        if length == len(tails):
            tails.append(place)
            at_tail.append(index)
        else:
            tails[length], at_tail[length] = place, index
    longest = []
    index = at_tail[-1] if at_tail else -1
    while index >= 0:
        longest.append(pairs[index])
        index = before[index]
    return longest[::-1]


def add_run(runs: list[Run], run: Run) -> None:
    """Append a run, or extend the last one that it continues."""
    last = runs[-1] if runs else None
    if last is not None and (last.old_end, last.new_end) == (run.old, run.new):
        runs[-1] = Run(last.old, last.new, last.count + run.count)
    else:
        runs.append(run)


_STRIDE = 1 << 16

Items = TypeVar("Items", str, bytes, list[int], list[bytes], tuple[bytes, ...])


def common_prefix(a: Items, b: Items) -> int:
    """Count the leading characters, bytes, tokens, chunks or hashes that `a` and `b` share."""
    limit = min(len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    at = 0
    while a[at : at + _STRIDE] == b[at : at + _STRIDE]:
        at += _STRIDE
    low, high = at, min(at + _STRIDE, limit)  # a[:low] agree; a[:high] do not
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

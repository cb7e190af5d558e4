"""The common parts of two versions of a message are found anywhere, and quickly."""

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.limits import EDIT_KEPT_TOKENS_MIN
from fabric.turn.edited_prompt import aligned_tokens

LEAST = EDIT_KEPT_TOKENS_MIN
MANY = 100_000
HANG_S = 20  # of CPU time; it takes a third of a second
FEW = st.lists(st.integers(0, 2), max_size=120)
SOME = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def count_kept(old: list[int], new: list[int]) -> int:
    """Check the invariants of the runs; return their number of tokens."""
    end = new_end = count = 0
    for run in aligned_tokens(old, new):
        assert run.count >= LEAST
        assert run.old >= end
        assert run.new >= new_end
        end, new_end = run.old_end, run.new_end
        assert old[run.old : end] == new[run.new : new_end]
        count += run.count
    return count


@given(FEW, FEW)
@settings(max_examples=100)
def test_runs_of_repetitive_text_are_equal_and_ascending(old: list[int], new: list[int]) -> None:
    """Two messages of three words have much in common, but few unique tokens."""
    count_kept(old, new)


@given(SOME, st.data())
@settings(max_examples=100)
def test_runs_of_edited_text_are_equal_and_ascending(old: list[int], data: st.DataObject) -> None:
    """Parts are removed, changed, swapped and repeated."""
    new: list[int] = []
    for _ in range(data.draw(st.integers(0, 6))):
        start = data.draw(st.integers(0, len(old)))
        new += old[start : data.draw(st.integers(start, len(old)))]
        new += data.draw(st.lists(st.integers(0, 9), max_size=3))
    count_kept(old, new)


def test_runs_cover_everything_but_the_edits() -> None:
    """A listing with some changed lines aligns in all other lines."""
    rng = random.Random(1)
    old = [rng.randrange(50_000) for _ in range(4_000)]
    new = list(old)
    for at in range(3_900, 0, -100):
        new[at : at + rng.randrange(5)] = [1] * rng.randrange(9)
    assert count_kept(old, new) >= len(old) - 40 * 5


def test_repeated_tokens_align_beside_unique_ones() -> None:
    """Anchors are unique tokens; tokens adjoining them need not be unique."""
    rng = random.Random(2)
    lines = [[rng.randrange(50_000) for _ in range(40)] for _ in range(3)]
    same = [7] * 60
    old = [*lines[0], *same, *lines[1], *same, *lines[2]]
    new = [1, *lines[0], *same, 2, *lines[1], *same, *lines[2], 3]
    assert count_kept(old, new) == len(old)


def hard_case(name: str) -> tuple[list[int], list[int]]:
    """Return 100k tokens and an edited version that are hard to align."""
    rng = random.Random(3)
    old = [rng.randrange(50_000) for _ in range(MANY)]
    if name == "nothing alike":
        return old, [rng.randrange(50_000) for _ in range(MANY)]
    if name == "one token":
        return [3, *[0] * MANY], [1, *[0] * MANY, 2]
    if name == "an edit in each line":
        return old, [1 if at % 40 == 0 else token for at, token in enumerate(old)]
    lines = [old[at : at + 17] for at in range(0, MANY, 17)]
    rng.shuffle(lines)
    return old, [token for line in lines for token in line]


@pytest.mark.parametrize(
    "name", ["nothing alike", "one token", "an edit in each line", "lines in another order"]
)
def test_alignment_time_is_bounded(name: str) -> None:
    """The bound is generous: an algorithm of quadratic time would take hours."""
    old, new = hard_case(name)
    before_s = time.process_time()
    count_kept(old, new)
    assert time.process_time() - before_s < HANG_S

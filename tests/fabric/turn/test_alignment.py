"""The common parts of two texts are found and never invented."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fabric.turn.alignment import align_chunks

CHUNKS = st.lists(st.sampled_from([bytes([65 + i]) for i in range(12)]), max_size=30)


def _pairs(old: list[bytes], new: list[bytes]) -> list[tuple[int, int]]:
    return [(run.old + i, run.new + i) for run in align_chunks(old, new) for i in range(run.count)]


@given(CHUNKS, CHUNKS)
def test_runs_are_equal_and_ascending(old: list[bytes], new: list[bytes]) -> None:
    """In both texts, runs use each chunk at most once."""
    pairs = _pairs(old, new)
    assert all(old[a] == new[b] for a, b in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


@given(st.lists(st.binary(min_size=1, max_size=3), unique=True, max_size=40), st.data())
def test_all_remaining_chunks_of_distinct_text_are_found(
    old: list[bytes], data: st.DataObject
) -> None:
    """All chunks are found after any removals and insertions."""
    kept = [chunk for chunk in old if data.draw(st.booleans())]
    new: list[bytes] = []
    for chunk in kept:
        new += data.draw(st.lists(st.just(b"<new>"), max_size=2))
        new.append(chunk)
    assert [old[a] for a, _ in _pairs(old, new)] == kept


def test_repeated_chunks_align_with_their_neighbors() -> None:
    """Marks repeat in a conversation; only the messages' texts distinguish them."""
    old = [b"[", b"one", b"]", b"[", b"two", b"]", b"[", b"three", b"]"]
    new = [b"[", b"one", b"]", b"[", b"cut", b"]", b"[", b"three", b"]"]
    kept = _pairs(old, new)
    assert (4, 4) not in kept
    assert len(kept) == len(old) - 1


def test_equal_texts_align_as_one_run() -> None:
    """This includes texts without any unique chunk."""
    text = [b"a", b"b"] * 9
    assert [run.count for run in align_chunks(text, text)] == [len(text)]

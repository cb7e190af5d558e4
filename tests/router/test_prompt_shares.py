"""The share of a prompt that is cached, in bytes: pieces end with messages, and differ in size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.limits import SKETCH_PIECE_BYTES, SKETCH_PIECES_MAX
from fabric.turn.messages import Message, MessageRole
from fabric.turn.sketch import common_pieces, sketch_chunks, sketch_ends
from router.prompt import chat_prompt, raw_prompt, tokens_prompt

LONG = Message(MessageRole.SYSTEM, ("rule " * 3_277)[: 16 * 1_024])
SHORT = [Message(MessageRole.USER, f"step {number}") for number in range(60)]


def share(known, query):
    return query.share(common_pieces(known.sketch, query.sketch))


@pytest.mark.parametrize(
    ("known", "query", "expected"),
    [
        ([LONG], [LONG, *SHORT], 0.85),
        (SHORT, [*SHORT, LONG], 0.15),
        ([LONG, *SHORT], [LONG, *SHORT], 1.0),
        ([SHORT[1]], [LONG], 0.0),
    ],
)
def test_share_counts_cached_bytes_for_any_messages(known, query, expected):
    known, query = chat_prompt(known), chat_prompt(query)

    exact = expected and min(known.bytes_count / query.bytes_count, 1.0)
    assert share(known, query) == pytest.approx(exact, abs=0.01)
    assert share(known, query) == pytest.approx(expected, abs=0.05)


def test_share_counts_raw_text_and_token_prompts():
    text = "x" * (10 * SKETCH_PIECE_BYTES)
    assert share(raw_prompt(text[: 5 * SKETCH_PIECE_BYTES]), raw_prompt(text)) == 0.5
    assert share(tokens_prompt(range(512)), tokens_prompt(range(2_048))) == 0.25
    assert raw_prompt("").share(0) == 0.0


@given(st.lists(st.integers(0, 3 * SKETCH_PIECE_BYTES), max_size=20))
def test_each_sketch_piece_has_its_end(sizes):
    ends = sketch_ends(sizes)

    assert len(ends) == len(sketch_chunks([b"x" * size for size in sizes]))
    assert list(ends) == sorted(set(ends))
    assert not ends or ends[-1] == sum(sizes)


def test_sketch_ends_are_bounded_as_sketches():
    assert len(sketch_ends([1] * (2 * SKETCH_PIECES_MAX))) == SKETCH_PIECES_MAX

"""With any stored record, a prompt with plain marks has the tokens of a fresh encoding."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from fabric.turn.edited_prompt import plan_edited_prompt
from fabric.turn.generation import MatchKind
from fabric.turn.prompt_plan import Transcript, plan_prompt
from node.dialect.plain_marks import MarkFinder
from node.mlx.chat_tokenizer import ChatTokenizer
from tests.node.mlx.test_plain_encoder import MAKERS
from tests.support.tiny_models import write_tokenizer

PARTS = ["the cat sat", " on the mat", "größer", "\n", "  ", "<|im_", "end|>", "<", "東"]
# A text, or a mark of the frame (control) or within a text (plain).
PIECES = st.lists(
    st.one_of(st.sampled_from(PARTS), st.tuples(st.integers(0, 9), st.booleans())), max_size=9
)


@pytest.fixture(scope="module", params=["tiny", "bytes", "merged", "normalized"])
def tokenizer(request, tmp_path_factory):
    return MAKERS[request.param](tmp_path_factory.mktemp("plan") / "t")


def spell_pieces(tokenizer, pieces):
    """Return a text and the places of its plain marks, those that parts form included."""
    marks = sorted(tokenizer.control_marks.ids)
    text, control = "", set()
    for piece in pieces:
        if isinstance(piece, str):
            text += piece
            continue
        number, is_control = piece
        control |= {len(text)} if is_control else set()
        text += marks[number % len(marks)]
    places = [at for at in MarkFinder(marks).places(text) if at not in control]
    return text, [len(text[:at].encode()) for at in places]


def stored_record(tokenizer, text, plain):
    encoded = tokenizer.encode(text, plain=plain)
    return Transcript(text.encode(), encoded.ids, encoded.ends)


@given(head=PIECES, old=PIECES, new=PIECES, flips=st.integers(0, 511))
@settings(max_examples=150)
def test_fed_tokens_equal_a_fresh_encoding(tokenizer, head, old, new, flips):
    record = stored_record(tokenizer, *spell_pieces(tokenizer, head + old))
    flipped = [
        piece if isinstance(piece, str) else (piece[0], piece[1] != bool(flips >> at & 1))
        for at, piece in enumerate(head)
    ]
    for pieces in (head + new, flipped + new, flipped + old, head + old):
        text, plain = spell_pieces(tokenizer, pieces)
        plan = plan_prompt(tokenizer, text, record, raw=False, plain=plain)
        fresh = tokenizer.encode(text, plain=plain)

        assert plan.ids == fresh.ids
        assert plan.ends == sorted(plan.ends)


@given(pieces=PIECES)
@settings(max_examples=100)
def test_plain_marks_are_recovered_from_stored_tokens(tokenizer, pieces):
    text, plain = spell_pieces(tokenizer, pieces)
    encoded = tokenizer.encode(text, plain=plain)

    found = tokenizer.control_marks.plain_in(text.encode(), encoded.ids, encoded.ends)
    assert list(found) == plain


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    return ChatTokenizer(load(folder))


SYSTEM = "<|im_start|>system\nthe cat sat on the mat<|im_end|>\n"
SENTENCES = "the dog sat on the log and the cat sat on the mat. " * 3


def test_plain_marks_never_match_stored_control_marks(tiny):
    frame = f"{SYSTEM}<|im_start|>user\n{SENTENCES}"
    turns = f"{frame}<|im_end|>\n<|im_start|>user\n{SENTENCES}<|im_end|>\n"
    places = MarkFinder(tiny.control_marks.ids).places(turns)
    inner = [at for at in places if len(frame) <= at < len(turns) - 20]
    assert len(inner) == 2
    for before, after in (([], inner), (inner, [])):
        record = stored_record(tiny, turns, before)
        plan = plan_prompt(tiny, turns, record, raw=False, plain=after)

        assert plan.ids == tiny.encode(turns, plain=after).ids
        assert plan.match is MatchKind.DIVERGE
        assert plan.ends[plan.kept_tokens - 1] <= inner[0]


def test_edited_prompt_keeps_no_token_of_another_kind(tmp_path):
    """The mark strips white space before it, so prompts are not cut there."""
    tokenizer = MAKERS["normalized"](tmp_path / "t")
    (end,) = (text for text in tokenizer.control_marks.ids if "end" in text)
    assert tokenizer.control_marks.ids[end] not in tokenizer.cut_texts
    start, words = "<|im_start|>", "abcdefgh" * 20
    rest = f"{start}{words}{end}{words}{start}{words}"
    old, new = f"{start}{words}{start}{words}{rest}", f"{start}{words}{start}b{words}{rest}"
    record = stored_record(tokenizer, old, ())
    plain = [new.index(end)]
    plan_unedited = plan_prompt(tokenizer, new, record, raw=False, plain=plain)
    control = tokenizer.control_marks.tokens
    plan = plan_edited_prompt(plan_unedited, record, tokenizer.cut_texts, control=control)

    assert plan_unedited.ids == tokenizer.encode(new, plain=plain).ids
    assert plan is None or plan.ids == plan_unedited.ids

"""For any edited history, the fed tokens are the prompt and moved rows are unchanged."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from fabric.limits import EDIT_KEPT_TOKENS_MIN, EDIT_MOVES_MAX
from fabric.turn.alignment import common_prefix
from fabric.turn.edited_prompt import Edit, plan_edited_prompt
from fabric.turn.generation import MatchKind
from fabric.turn.prompt_plan import PromptPlan, Transcript, plan_prompt
from node.mlx.chat_tokenizer import ChatTokenizer
from tests.support.tiny_models import write_tokenizer

WORDS = ("the", "cat", "sat", "on", "größer", "東京", "dogs", "run", "far", "and", "hide")
START, END = "<|im_start|>", "<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Return a tokenizer whose merges cross word boundaries."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer(load(folder, eos_token_ids=[2]))


def _message(number: int, words: int = 40) -> str:
    return " ".join(WORDS[(number * 5 + i * (number + 1)) % len(WORDS)] for i in range(words))


def _text(messages: list[str]) -> str:
    roles = ("system", "user", "assistant")
    turns = [f"{START}{roles[min(i, 1 + i % 2)]}\n{m}{END}" for i, m in enumerate(messages)]
    return "".join(turns)


def _stored(tokenizer: ChatTokenizer, text: str) -> Transcript:
    encoded = tokenizer.encode(text)
    return Transcript(text.encode(), list(encoded.ids), list(encoded.ends))


MESSAGES = [_message(n) for n in range(9)]


def _planned(
    tokenizer: ChatTokenizer,
    text: str,
    stored: Transcript,
    recomputed: int = 0,
    edits: Sequence[Edit] = (),
) -> PromptPlan | None:
    plain = plan_prompt(tokenizer, text, stored, raw=False)
    return plan_edited_prompt(plain, stored, tokenizer.cut_texts, recomputed, edits)


def _check(
    tokenizer: ChatTokenizer,
    stored: Transcript,
    text: str,
    recomputed: int = 0,
    edits: Sequence[Edit] = (),
) -> int:
    """Plan an edit and check its invariants; return how many tokens after it are kept."""
    plan = _planned(tokenizer, text, stored, recomputed, edits)
    if plan is None:
        return 0
    fresh = tokenizer.encode(text)
    assert (plan.ids, plan.ends) == (fresh.ids, fresh.ends)
    assert plan.match is MatchKind.EDIT
    assert plan.text.decode() == text
    first, *others = plan.moves
    assert (first.start, first.new_start, first.end) == (0, 0, plan.kept_tokens)
    end = new_end = 0
    for move in plan.moves:
        assert end <= move.start < move.end <= len(stored.ids)
        assert new_end <= move.new_start
        assert stored.ids[move.start : move.end] == plan.ids[move.new_start : move.new_end]
        end, new_end = move.end, move.new_end
    assert new_end < len(plan.ids)
    assert plan.ids[: plan.taken_tokens] == stored.ids[: plan.taken_tokens]
    assert plan.taken_tokens <= plan.kept_tokens
    return sum(move.end - move.start for move in others)


def test_clearing_a_message_moves_the_messages_behind_it(tokenizer: ChatTokenizer) -> None:
    """The end of the cleared message's frame moves with them."""
    stored = _stored(tokenizer, _text(MESSAGES))
    edited = [*MESSAGES[:4], "[cleared]", *MESSAGES[5:], _message(30)]
    moved = _check(tokenizer, stored, _text(edited))
    tokens_after = len(tokenizer.encode(_text(MESSAGES[5:])).ids)
    assert moved >= tokens_after


def test_common_beginning_with_removed_message_stays_in_place(tokenizer: ChatTokenizer) -> None:
    """Two messages begin alike and the first is removed: the common beginning does not move."""
    alike = [f"{_message(40)} {_message(41)}", f"{_message(40)} {_message(42)}"]
    before = [*MESSAGES[:4], alike[0], MESSAGES[4], alike[1], *MESSAGES[5:]]
    stored = _stored(tokenizer, _text(before))
    text = _text([*before[:4], *before[6:], _message(30)])
    plan = _planned(tokenizer, text, stored)
    assert plan is not None
    assert plan.kept_tokens == common_prefix(plan.ids, stored.ids)
    assert plan.kept_tokens > len(tokenizer.encode(_text([*MESSAGES[:4], _message(40)])).ids) - 10
    _check(tokenizer, stored, text)


def test_common_beginning_with_inserted_message_stays_in_place(tokenizer: ChatTokenizer) -> None:
    """A message is inserted before one that begins alike: the common beginning does not move."""
    existing, inserted = (
        f"{_message(40)} {_message(41)}",
        f"{_message(40)} {_message(42)} {_message(43)}",
    )
    before = [*MESSAGES[:4], existing, *MESSAGES[4:]]
    stored = _stored(tokenizer, _text(before))
    text = _text([*before[:4], inserted, MESSAGES[8], *before[4:], _message(30)])
    plan = _planned(tokenizer, text, stored)
    assert plan is not None
    assert plan.kept_tokens == common_prefix(plan.ids, stored.ids)
    assert plan.kept_tokens > len(tokenizer.encode(_text([*MESSAGES[:4], _message(40)])).ids) - 10
    assert _check(tokenizer, stored, text) > 0


def test_removing_two_messages_moves_the_rest_without_a_hole(tokenizer: ChatTokenizer) -> None:
    """A removal that inserts nothing leaves no hole."""
    stored = _stored(tokenizer, _text(MESSAGES))
    text = _text([*MESSAGES[:3], *MESSAGES[5:], _message(30)])
    plan = _planned(tokenizer, text, stored)
    assert plan is not None
    first, second = plan.moves
    assert first.new_end == second.new_start
    _check(tokenizer, stored, text)


def test_edit_within_a_message_recomputes_only_that_part(tokenizer: ChatTokenizer) -> None:
    """The words around the edit are kept."""
    stored = _stored(tokenizer, _text(MESSAGES))
    words = MESSAGES[4].split()
    edited = " ".join([*words[:20], "[cut]", *words[25:]])
    text = _text([*MESSAGES[:4], edited, *MESSAGES[5:], _message(30)])
    plan = _planned(tokenizer, text, stored)
    assert plan is not None
    _, second = plan.moves
    assert second.start < len(tokenizer.encode(_text(MESSAGES[:5])).ids) - 10
    _check(tokenizer, stored, text)


def test_text_between_two_edits_of_a_message_is_kept(tokenizer: ChatTokenizer) -> None:
    """A line near the beginning and another near the end of a listing are changed."""
    lines = [f"{number} {number * 7919} {number * 104_729}" for number in range(100)]
    edited = [*lines[:3], "[cut]", *lines[4:96], "[cut too]", *lines[97:]]
    before = [*MESSAGES[:4], "\n".join(lines), *MESSAGES[5:]]
    stored = _stored(tokenizer, _text(before))
    moved = _check(
        tokenizer, stored, _text([*before[:4], "\n".join(edited), *before[5:], _message(30)])
    )
    between = len(tokenizer.encode("\n".join(lines[4:96])).ids)
    after = len(tokenizer.encode(_text(MESSAGES[5:])).ids)
    assert between > 500
    assert moved >= 0.98 * (between + after)


@pytest.mark.parametrize("wrong_bytes", [0, 7])
def test_repeated_lines_between_known_edits_are_kept(
    tokenizer: ChatTokenizer, wrong_bytes: int
) -> None:
    """No run of lines is unique, so edits locate them; wrong places keep only equal tokens."""
    lines = ["the cat sat on größer 東京"] * 200
    edited = [*lines[:3], "[cut]", *lines[4:100], "[cut]", *lines[101:150], "cut", *lines[151:]]
    whole, parts = "\n".join(lines), [*MESSAGES[:4], *MESSAGES[5:]]
    stored = _stored(tokenizer, _text([*parts[:4], whole, *parts[4:]]))
    text = _text([*parts[:4], "\n".join(edited), *parts[4:], _message(30)])
    start = stored.text.index(whole.encode()) + wrong_bytes
    size = len(lines[0].encode())
    edits = [
        (start + at * (size + 1), start + at * (size + 1) + size, len(edited[at]))
        for at in (3, 100, 150)
    ]
    moved = _check(tokenizer, stored, text, edits=edits)
    between = len(tokenizer.encode("\n".join(lines[4:146])).ids)
    moved_without_edits = _check(tokenizer, stored, text)
    assert moved - moved_without_edits > 0.95 * between or wrong_bytes


def test_quotation_in_another_message_is_not_matched(tokenizer: ChatTokenizer) -> None:
    """A question that quotes a cleared result is another message."""
    quoted = _message(20, 60)
    stored = _stored(tokenizer, _text([*MESSAGES[:3], quoted]))
    text = _text([*MESSAGES[:3], "[cleared]", MESSAGES[5], f"Why {quoted}?"])
    assert _check(tokenizer, stored, text) == 0


def test_longest_pieces_move_when_there_are_too_many(tokenizer: ChatTokenizer) -> None:
    """Each moved piece adds a cost to every later token."""
    lines = [f"{number} {number * 7919} {number * 104_729} {number}" for number in range(600)]
    before = [*MESSAGES[:4], "\n".join(lines), *MESSAGES[5:]]
    stored = _stored(tokenizer, _text(before))
    cut = "\n".join(line if number % 2 else "x" for number, line in enumerate(lines))
    text = _text([*before[:4], cut, *before[5:], _message(30)])
    plan = _planned(tokenizer, text, stored)
    assert plan is not None
    assert len(plan.moves) == EDIT_MOVES_MAX
    tokens_after = len(tokenizer.encode(_text(MESSAGES[5:])).ids)
    assert _check(tokenizer, stored, text) > tokens_after


@given(st.data())
@settings(max_examples=150)
def test_any_edit_feeds_a_fresh_encoding(tokenizer: ChatTokenizer, data: st.DataObject) -> None:
    """Remove, change, insert, swap and repeat messages: the plan feeds a fresh encoding."""
    stored = _stored(tokenizer, _text(MESSAGES))
    picked = data.draw(st.lists(st.integers(0, 14), max_size=14))
    edited = [MESSAGES[n] if n < len(MESSAGES) else _message(n, n) for n in picked]
    edited = [
        _changed(data, message) if data.draw(st.booleans()) else message for message in edited
    ]
    recomputed = data.draw(st.sampled_from([0, 0, 7]))
    _check(tokenizer, stored, _text([MESSAGES[0], *edited]), recomputed)


def _changed(data: st.DataObject, message: str) -> str:
    """Change some words of a message."""
    words = message.split()
    for at in sorted(data.draw(st.sets(st.integers(0, 39), max_size=3)), reverse=True):
        words[at : at + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from([[], ["x"]]))
    return " ".join(words)


def test_tokens_to_recompute_are_not_kept(tokenizer: ChatTokenizer) -> None:
    """The first tokens after each edit are recomputed."""
    stored = _stored(tokenizer, _text(MESSAGES))
    text = _text([*MESSAGES[:4], "[cleared]", *MESSAGES[5:], _message(30)])
    plain, recomputing = _check(tokenizer, stored, text), _check(tokenizer, stored, text, 32)
    assert plain - recomputing == 32


def test_edit_at_the_very_start_keeps_nothing(tokenizer: ChatTokenizer) -> None:
    """An edit cannot keep rows if it changes the first tokens, which all others attend to."""
    stored = _stored(tokenizer, _text(MESSAGES))
    assert _check(tokenizer, stored, _text(["other", *MESSAGES[1:]])) == 0


def test_pieces_below_the_minimum_are_not_moved(tokenizer: ChatTokenizer) -> None:
    """Moving so few tokens is not worth its cost."""
    stored = _stored(tokenizer, _text([*MESSAGES[:4], "yes"]))
    assert len(tokenizer.encode("yes").ids) < EDIT_KEPT_TOKENS_MIN
    assert _check(tokenizer, stored, _text([*MESSAGES[:3], "yes", _message(30)])) == 0

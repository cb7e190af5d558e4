"""With any stored record, a plan feeds the tokens of a fresh encoding."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from fabric.turn.generation import MatchKind
from fabric.turn.prompt_plan import EMPTY_TRANSCRIPT, PromptPlan, Transcript, plan_prompt
from node.mlx.chat_tokenizer import ChatTokenizer
from tests.support.tiny_models import SPECIALS, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """Return a tokenizer whose merges cross word boundaries."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return ChatTokenizer(load(folder, eos_token_ids=[2]))


def stored_record(tokenizer: ChatTokenizer, text: str, answer: str = "") -> Transcript:
    """Record what a node holds after answering `text`."""
    prompt = tokenizer.encode(text)
    tail = tokenizer.encode(answer) if answer else None
    ids, ends = list(prompt.ids), list(prompt.ends)
    if tail is not None:
        ids += tail.ids
        ends += [len(text.encode()) + end for end in tail.ends]
    return Transcript((text + answer).encode(), ids, ends)


def plan(tokenizer: ChatTokenizer, text: str, record: Transcript) -> PromptPlan:
    """Plan a templated prompt."""
    return plan_prompt(tokenizer, text, record, raw=False)


TURN = "<|im_start|>user\nthe cat sat on the mat, größer 東京<|im_end|>\n<|im_start|>assistant\n"


def test_empty_record_keeps_nothing(tokenizer: ChatTokenizer) -> None:
    """A first prompt keeps nothing and feeds its own encoding."""
    got = plan(tokenizer, TURN, EMPTY_TRANSCRIPT)

    assert got.match is MatchKind.NONE
    assert got.kept_tokens == 0
    assert got.ids == tokenizer.encode(TURN).ids


def test_exact_repeat_keeps_every_token(tokenizer: ChatTokenizer) -> None:
    """The same prompt again keeps all its tokens and drops the old answer."""
    got = plan(tokenizer, TURN, stored_record(tokenizer, TURN, "the dog<|im_end|>"))

    assert got.match is MatchKind.EXACT
    assert got.kept_tokens == len(tokenizer.encode(TURN).ids)


def test_extension_keeps_the_tokens_the_answer_was_sampled_with(tokenizer: ChatTokenizer) -> None:
    """An answer keeps the tokens it was generated with, canonical or not."""
    answer_ids = [
        *tokenizer.encode("the").ids,
        *tokenizer.encode(" c").ids,
        *tokenizer.encode("at sat").ids,
        2,
    ]
    assert answer_ids[:-1] != tokenizer.encode("the cat sat").ids
    prompt = tokenizer.encode(TURN)
    sizes = [len(tokenizer.token_text(token).encode()) for token in answer_ids]
    ends = [len(TURN.encode()) + sum(sizes[: i + 1]) for i in range(len(sizes))]
    record = Transcript(
        (TURN + "the cat sat<|im_end|>").encode(),
        prompt.ids + answer_ids,
        prompt.ends + ends,
    )

    got = plan(tokenizer, TURN + "the cat sat<|im_end|>\n" + TURN, record)

    assert got.match is MatchKind.EXTEND
    assert got.kept_tokens == len(record.ids)
    assert got.ids[: len(record.ids)] == record.ids
    assert got.ids[len(record.ids) :] == tokenizer.encode("<|im_end|>\n" + TURN).ids[1:]


def test_answer_cut_by_a_limit_extends(tokenizer: ChatTokenizer) -> None:
    """An answer without its end token is extended by a template that adds one."""
    record = stored_record(tokenizer, TURN, "the cat sa")

    got = plan(tokenizer, TURN + "the cat sa<|im_end|>\n" + TURN, record)

    assert got.match is MatchKind.EXTEND
    assert got.kept_tokens == len(record.ids)


def test_continued_answer_is_not_cut_inside_a_word(tokenizer: ChatTokenizer) -> None:
    """Text that continues an answer mid-word is re-encoded as a whole word."""
    record = stored_record(tokenizer, TURN, "the cat sa")
    longer = TURN + "the cat sat on the mat<|im_end|>\n"

    assert plan(tokenizer, longer, record).ids == tokenizer.encode(longer).ids


PIECES = st.sampled_from(
    [
        "the cat sat",
        " on the mat",
        "größer",
        " 東京",
        "東",
        "é",
        "🦊",
        " ",
        "\n",
        "t",
        "he",
        '{"a": 1}',
        *SPECIALS,
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


@given(head=TEXTS, old=TEXTS, new=TEXTS, cut=st.integers(0, 200))
@settings(max_examples=300)
def test_fed_tokens_equal_those_of_a_cold_run(
    tokenizer: ChatTokenizer, head: str, old: str, new: str, cut: int
) -> None:
    """Any prompt against any record, cut anywhere, feeds a fresh encoding's tokens."""
    record = stored_record(tokenizer, head + old)
    prompt = (head + old)[:cut] + new

    got = plan(tokenizer, prompt, record)

    assert got.ids == tokenizer.encode(prompt).ids
    assert got.ids[: got.kept_tokens] == record.ids[: got.kept_tokens]
    assert len(got.ends) == len(got.ids)
    assert got.ends == sorted(got.ends)
    if got.ends:
        assert got.ends[-1] == len(prompt.encode())

"""A fork of an answer, which shows one token ahead of time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, load

from node.mlx.answer import Answer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.loaded_model import BUNDLED
from tests.support.tiny_models import write_tokenizer

TEXTS = st.lists(
    st.sampled_from(["the cat", " sat", "größer", " 東京", "🦊", "\n", " ", "<think>", "STOP"]),
    min_size=1, max_size=8,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module", params=["tiny", "recall", "naive"])
def tokenizer(request, tmp_path_factory):
    folder = BUNDLED / "recall"
    if request.param != "recall":
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(folder)
    wrapper = load(folder, eos_token_ids=[2])
    if request.param == "naive":
        wrapper._detokenizer = NaiveStreamingDetokenizer(wrapper._tokenizer)
    return ChatTokenizer(wrapper)


@given(text=TEXTS, at=st.integers(0, 40))
@settings(max_examples=150)
def test_fork_shows_the_next_token_and_leaves_the_answer_unchanged(tokenizer, text, at):
    ids = tokenizer.encode(text).ids
    at %= len(ids)
    forked, plain = (Answer(tokenizer, "", ("STOP!",), None) for _ in range(2))
    for token in ids[:at]:
        forked.push(token)
        plain.push(token)
    ahead = forked.fork().push(ids[at])

    assert (forked.text, forked.ends) == (plain.text, plain.ends)
    assert ahead == plain.push(ids[at])
    assert [forked.push(token) for token in ids[at:]][1:] == [plain.push(t) for t in ids[at + 1 :]]
    assert forked.finish(stopped=False) == plain.finish(stopped=False)
    assert (forked.text, forked.ends) == (plain.text, plain.ends)

"""Cut points of prompts: only tokens that are matched at every place of their text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fabric.turn.prompt_plan import Transcript, plan_prompt
from node.mlx.chat_tokenizer import ChatTokenizer

NEWLINES = 6


def build_tokenizer(folder, tokens, normalizer=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    inner.add_tokens(tokens)
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return ChatTokenizer(load(folder))


def special_token(text, **options):
    return AddedToken(text, **{"special": True, "normalized": False, **options})


@pytest.fixture(scope="module")
def newline_tokenizer(tmp_path_factory):
    """Return a tokenizer with tokens for runs of line ends, as Gemma's has."""
    tokens = [special_token("<end>"), special_token("<eats>", rstrip=True)]
    tokens += [AddedToken("\n" * size, normalized=False) for size in range(2, NEWLINES + 1)]
    return build_tokenizer(tmp_path_factory.mktemp("runs") / "t", tokens)


def test_white_space_runs_are_not_cut_points(newline_tokenizer):
    assert sorted(newline_tokenizer.cut_texts.values()) == [b"<eats>", b"<end>"]


def test_token_matched_only_at_the_start_is_not_a_cut_point(tmp_path):
    """The normalizer changes its text in the middle of a prompt."""
    tokens = [special_token("</s>", normalized=True), special_token("<end>")]
    tokenizer = build_tokenizer(tmp_path / "u", tokens, normalizers.Replace("\n</s", "\n_"))

    assert list(tokenizer.cut_texts.values()) == [b"<end>"]


PIECES = st.sampled_from(["a", "b c", "\n", "\n\n", "\n\n\n\n", " ", "<end>", "<eats>", "é"])
TEXTS = st.lists(PIECES, max_size=10).map("".join)


@given(head=TEXTS, old=TEXTS, new=TEXTS, cut=st.integers(0, 60))
@settings(max_examples=400)
def test_fed_tokens_equal_a_fresh_encoding(newline_tokenizer, head, old, new, cut):
    encoded = newline_tokenizer.encode(head + old)
    stored = Transcript((head + old).encode(), encoded.ids, encoded.ends)
    prompt = (head + old)[:cut] + new
    plan = plan_prompt(newline_tokenizer, prompt, stored, raw=False)

    assert plan.ids == newline_tokenizer.encode(prompt).ids
    assert plan.ends == sorted(plan.ends)


def test_token_stripping_white_space_after_it_is_a_cut_point(newline_tokenizer):
    """Only the text after the last such token is encoded again."""
    text = "<eats>\nabc<eats>\nde"
    encoded = newline_tokenizer.encode(text)
    stored = Transcript(text.encode(), encoded.ids, encoded.ends)
    plan = plan_prompt(newline_tokenizer, text + "f", stored, raw=False)

    assert plan.taken_tokens == encoded.ids.index(newline_tokenizer.encode("<eats>").ids[0], 1)
    assert plan.ids == newline_tokenizer.encode(text + "f").ids

"""Prompts in tokens decode to their own text with every tokenizer."""

import random

import pytest
from mlx_lm.tokenizer_utils import load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.token_text import spell
from tests.support.agent_traffic import corpus
from tests.support.template_shapes import SHAPES, write_tokenizer

TEXTS = ["one two", "  x\n\n y ", "caf\u00e9 \u6771\u4eac \U0001f98a\U0001f319!", "\U0001f98a", "a"]


def metaspace():
    """Train a tokenizer that writes spaces in front of words, as SentencePiece's do."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
    )
    bytes_of = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=["<unk>", *bytes_of], show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_a_text_are_spelled_as_the_text(tmp_path, text):
    write_tokenizer(tmp_path, SHAPES["chatml"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    text = f"<|im_start|>user\n{text}<|im_end|>"
    ids = tokenizer.encode(text).ids
    spelled = spell(ids, tokenizer.decode)
    assert spelled.text == text
    assert len(spelled.ends) == len(ids)
    assert spelled.ends == sorted(spelled.ends)
    assert spelled.ends[-1] == len(text.encode())


@pytest.mark.parametrize("text", ["one two three", "caf\u00e9 \U0001f98a two"])
def test_spaces_between_words_are_kept(text):
    tokenizer = metaspace()
    ids = tokenizer.encode(text, add_special_tokens=False).ids

    def decode(some):
        return tokenizer.decode(some, skip_special_tokens=False)

    assert spell(ids, decode).text == decode(ids) == text


def test_incomplete_characters_are_spelled_in_bounded_steps(tmp_path):
    write_tokenizer(tmp_path, SHAPES["chatml"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    (half,) = {*tokenizer.encode("\U0001f98a").ids[:1]}
    looked_at = []

    def decode(ids):
        looked_at.append(len(ids))
        return tokenizer.decode(ids)

    ids = [half] * 2_000
    spelled = spell(ids, decode)
    assert max(looked_at) <= 32
    assert len(spelled.ends) == len(ids)
    assert spelled.ends[-1] == len(spelled.text.encode())


def test_any_token_sequence_is_spelled(tmp_path):
    write_tokenizer(tmp_path, SHAPES["chatml"], corpus())
    tokenizer = ChatTokenizer(load(tmp_path))
    for seed in range(50):
        rng = random.Random(seed)
        ids = [rng.randrange(tokenizer.vocabulary_size) for _ in range(rng.randrange(1, 60))]
        spelled = spell(ids, tokenizer.decode)
        assert len(spelled.ends) == len(ids)
        assert spelled.ends == sorted(spelled.ends)
        assert spelled.ends[-1] == len(spelled.text.encode())

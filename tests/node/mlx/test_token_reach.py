"""No token decodes to more text than published; unbounded tokenizers publish no reach."""

import sys
import unicodedata
from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from fabric.limits import BODY_BYTES_MAX
from fabric.turn.prompt_plan import prompt_bytes_max
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.loaded_model import BUNDLED
from node.mlx.token_text import token_reach_bytes
from tests.support.tiny_models import write_tokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LONG = "ab" * 5  # the longest token


@cache
def letters_of_unicode():
    letters = map(chr, range(sys.maxunicode + 1))
    return [letter for letter in letters if unicodedata.category(letter) not in {"Cn", "Co", "Cs"}]


def bpe(letters=LETTERS, **options):
    vocab = {text: index for index, text in enumerate([*letters, "<unk>", LONG])}
    return models.BPE(vocab=vocab, merges=[], **options)


def reach_of(model, pre_tokenizer=BYTE_LEVEL, normalizer=None, added=()):
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.add_special_tokens(list(added))
    tokenizer = SimpleNamespace(
        backend_tokenizer=backend,
        added_tokens_decoder=backend.get_added_tokens_decoder(),
        get_vocab=backend.get_vocab,
    )
    return token_reach_bytes(tokenizer)


def sequence(*parts):
    return normalizers.Sequence(list(parts))


@pytest.mark.parametrize(
    ("parts", "reach_bytes"),
    [
        ((bpe(),), 10),
        ((bpe(), BYTE_LEVEL, normalizers.NFC()), 40),
        ((bpe(), BYTE_LEVEL, sequence(normalizers.NFC(), normalizers.Lowercase())), 120),
        ((bpe(), BYTE_LEVEL, normalizers.Replace("abcdef", "ab")), 30),
        ((bpe(), BYTE_LEVEL, normalizers.Replace(" ", "▁")), 10),
        ((bpe(), BYTE_LEVEL, None, [AddedToken("<|eight|>" * 2)]), 18),
        ((bpe(BYTES, byte_fallback=True, unk_token="<unk>", fuse_unk=True), None), 10),
        ((bpe([], unk_token="<unk>"), pre_tokenizers.Metaspace()), 10),
    ],
)
def test_reach_is_derived_from_the_longest_token(parts, reach_bytes):
    assert reach_of(*parts) == reach_bytes


@pytest.mark.parametrize(
    "parts",
    [
        (bpe(LETTERS[1:]),),
        (bpe([]), None),
        (bpe([], unk_token="<unk>", fuse_unk=True), None),
        (bpe(BYTES[1:], byte_fallback=True, unk_token="<unk>", fuse_unk=True), None),
        (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),),
        (models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"),),
        (models.Unigram([("a", 0.0), ("<unk>", 0.0)], unk_id=1),),
        (bpe(), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL])),
        (bpe(), pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])),
        (bpe(), BYTE_LEVEL, normalizers.Strip()),
        (bpe(), BYTE_LEVEL, normalizers.StripAccents()),
        (bpe(), BYTE_LEVEL, normalizers.BertNormalizer()),
        (bpe(), BYTE_LEVEL, normalizers.Replace("a", "")),
        (bpe(), BYTE_LEVEL, sequence(normalizers.NFC(), normalizers.Nmt())),
        (bpe(), BYTE_LEVEL, None, [AddedToken("<|end|>", rstrip=True)]),
    ],
)
def test_tokenizers_that_may_drop_text_have_no_reach(parts):
    assert reach_of(*parts) is None


def test_tokenizer_without_backend_has_no_reach():
    assert token_reach_bytes(SimpleNamespace()) is None


def test_prompt_bytes_are_bounded_by_context_and_body():
    assert prompt_bytes_max(100, 7) == 700
    assert prompt_bytes_max(1 << 30, 7) == BODY_BYTES_MAX
    assert prompt_bytes_max(100, None) == BODY_BYTES_MAX


@pytest.mark.parametrize(("form", "factor"), [("NFC", 4), ("NFD", 3), ("NFKC", 4), ("NFKD", 4)])
def test_normalization_shrinks_letters_at_most_by_the_assumed_factor(form, factor):
    """A normalized letter may decompose into its parts, each with its longest spelling."""
    whole = "NFKD" if "K" in form else "NFD"
    longest = {}
    for letter in letters_of_unicode():
        parts = unicodedata.normalize(whole, letter)
        assert size(letter) <= factor * size(parts)
        longest[parts] = max(longest.get(parts, 0), size(letter))
    for letter in letters_of_unicode():
        if unicodedata.normalize(form, letter) == letter:
            parts = unicodedata.normalize(whole, letter)
            spelled = sum(max(longest.get(part, 0), size(part)) for part in parts)
            assert spelled <= factor * size(letter)


def test_lowercasing_shrinks_letters_at_most_by_the_assumed_factor():
    assert max(size(x) / size(x.lower()) for x in letters_of_unicode()) <= 3


def size(text):
    return len(text.encode())


@pytest.fixture(scope="module", params=["tiny", "recall", "prose"])
def tokenizer(request, tmp_path_factory):
    folder = BUNDLED / request.param
    if request.param == "tiny":
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(folder)
    return ChatTokenizer(load(folder, eos_token_ids=[2]))


@given(text=st.text(max_size=200) | st.text(" \n", max_size=200))
@settings(max_examples=200)
def test_text_bytes_never_exceed_tokens_times_reach(tokenizer, text):
    assert tokenizer.reach_bytes is not None
    assert size(text) <= len(tokenizer.encode(text).ids) * tokenizer.reach_bytes

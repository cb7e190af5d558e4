"""Encoding that stops at a limit equals a whole encoding, or refuses the text correctly."""

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from fabric.errors import FabricError, RejectedError
from fabric.turn.prompt_plan import PromptLimit
from node.mlx import chat_tokenizer
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.loaded_model import BUNDLED
from node.mlx.token_text import TextPieces
from tests.support.tiny_models import SPECIALS, write_tokenizer

pytestmark = pytest.mark.usefixtures("small_pieces")

RECALLS = [
    "<|im_start|>",
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "Noted.",
    "I do not know.",
]
TEXTS = st.lists(
    st.sampled_from([
        "the cat sat", " on the mat", "größer", " 東京", "東", "é", "🦊", " ", "\n", "t", "he",
        "<|im_", "end|>", "<", "user\n", "I do not ", "know.", '{"a": 1}', *SPECIALS, *RECALLS,
    ]),
    max_size=30,
).map("".join)  # fmt: skip


@pytest.fixture(scope="module", params=["tiny", "recall"])
def tokenizer(request, tmp_path_factory):
    folder = BUNDLED / "recall"
    if request.param == "tiny":
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tokenizer(folder)
    return ChatTokenizer(load(folder, eos_token_ids=[2]))


def limit_of(tokens):
    return PromptLimit(tokens, 1 << 20)


@given(text=TEXTS)
@settings(max_examples=400)
def test_encoding_in_pieces_equals_encoding_the_whole(tokenizer, text):
    assert tokenizer.encode(text, limit=limit_of(1 << 20)) == tokenizer.encode(text)


@given(text=TEXTS, tokens=st.integers(1, 60))
@settings(max_examples=400)
def test_text_is_refused_exactly_at_the_token_limit(tokenizer, text, tokens):
    whole = tokenizer.encode(text)
    if len(whole.ids) < tokens:
        assert tokenizer.encode(text, limit=limit_of(tokens)) == whole
        return
    with pytest.raises(RejectedError) as caught:
        tokenizer.encode(text, limit=limit_of(tokens))
    assert caught.value.code == "context_length_exceeded"


@given(text=TEXTS)
@settings(max_examples=100)
def test_limit_includes_preceding_tokens(tokenizer, text):
    whole = tokenizer.encode(text)
    limit = limit_of(len(whole.ids) + 11)
    assert tokenizer.encode(text, limit=limit.after(10)) == whole
    with pytest.raises(RejectedError):
        tokenizer.encode(text, limit=limit.after(11))


def test_text_is_cut_before_special_tokens(tokenizer):
    pieces = list(tokenizer._pieces.cut("a<|im_end|>b<think>c"))
    assert [piece for piece, _ in pieces] == ["a", "<|im_end|>b", "<think>c"]


class Added:
    def __init__(self, content, **flags):
        self.content = content
        self.lstrip = self.rstrip = self.single_word = self.normalized = False
        vars(self).update(flags)


@pytest.mark.parametrize(
    ("added", "sure"),
    [
        ([Added("<s>")], {"<s>"}),
        ([Added("<s>", lstrip=True)], set()),
        ([Added("<s>", rstrip=True)], set()),
        ([Added("<s>", single_word=True)], set()),
        ([Added("<s>", normalized=True)], set()),
        ([Added("\n<s>")], set()),
        ([Added("<s>"), Added("<s>user")], {"<s>user"}),
        ([Added("<s>"), Added("x<s>y")], {"x<s>y"}),
        ([Added("<s>"), Added("ab<")], {"ab<"}),
        ([Added("||")], set()),
        ([Added("<s>"), Added(">>")], {"<s>"}),
    ],
)
def test_only_unambiguous_special_tokens_are_cut_points(added, sure):
    assert set(TextPieces(dict(enumerate(added))).ids) == sure


def test_text_is_encoded_whole_if_a_piece_starts_unexpectedly(tokenizer, monkeypatch):
    """A cut elsewhere than at special tokens may change tokens: the text is encoded whole."""
    wrong = TextPieces({7: Added("cat s")})
    monkeypatch.setitem(tokenizer.__dict__, "_pieces", wrong)
    text = "the cat sat on the mat"
    assert [piece for piece, _ in wrong.cut(text)] == ["the ", "cat sat on the mat"]
    assert tokenizer.encode(text, limit=limit_of(1 << 20)) == tokenizer.encode(text)


@pytest.mark.parametrize("piece", ["the cat sat on ", "x", " ", "größer 東京 ", "\n\n", "t he"])
def test_overlong_message_is_refused_after_encoding_a_part(tokenizer, piece, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "_SLICE_CHARS", 1 << 12)
    text = piece * (100_000 // len(piece))
    whole = tokenizer.encode(text)
    assert tokenizer.encode(text, limit=limit_of(len(whole.ids) + 1)) == whole

    inner, counts = tokenizer._tokenizer, []

    class Counting:
        def __call__(self, text, **options):
            counts.append(len(text))
            return inner(text, **options)

        def __getattr__(self, name):
            return getattr(inner, name)

    monkeypatch.setattr(tokenizer, "_tokenizer", Counting())
    with pytest.raises(RejectedError):
        tokenizer.encode(text, limit=limit_of(len(whole.ids) // 10))
    assert sum(counts) <= len(text) // 5


def test_unwanted_encoding_stops_early(tokenizer, monkeypatch):
    unwanted, calls = threading.Event(), []
    inner = tokenizer._tokenizer

    class HangsUp:
        def __call__(self, text, **options):
            calls.append(text)
            if len(calls) == 3:
                unwanted.set()
            return inner(text, **options)

        def __getattr__(self, name):
            return getattr(inner, name)

    assert tokenizer._pieces
    monkeypatch.setattr(tokenizer, "_tokenizer", HangsUp())
    with pytest.raises(FabricError) as caught:
        tokenizer.encode(
            "the cat<|im_end|>" * 1_000, limit=PromptLimit(1 << 20, 9, unwanted.is_set)
        )
    assert caught.value.code == "cancelled"
    assert len(calls) == 3

"""Plain marks are encoded as by a tokenizer without such tokens, and the frame as usual."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from fabric.turn.prompt_plan import PromptLimit
from node.dialect.plain_marks import MarkFinder
from node.mlx import plain_encoder
from node.mlx.chat_tokenizer import ChatTokenizer
from node.mlx.loaded_model import BUNDLED
from node.mlx.plain_encoder import PROBLEM
from tests.support.tiny_models import write_tokenizer

pytestmark = pytest.mark.usefixtures("small_pieces")

START, END, EATS = "<|im_start|>", "<|im_end|>", "<|eats|>"
NO_LIMIT = PromptLimit(1 << 20, 1 << 20)


def save(folder, inner, tokens=(), template=""):
    inner.add_tokens(list(tokens))
    folder.mkdir(exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return ChatTokenizer(load(folder))


def special(text, **options):
    return AddedToken(text, **{"special": True, "normalized": False, **options})


SPECIALS = [special(START), special(END)]


def bytes_of_text(folder):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return save(folder, inner, [*SPECIALS, special(EATS, rstrip=True)])


def pieces(*extra):
    letters = [chr(code) for code in range(0x21, 0x7F)] + ["\u2581", "é", "\n", "🦊"]
    return [*letters, *extra]


def merged(folder):
    """Marks are in the vocabulary, and merges lead to one of them."""
    chain = [END[:size] for size in range(2, len(END) + 1)]
    vocabulary = ["<unk>", *pieces(*chain, START, "ab")]
    merges = [(end[:-1], end[-1]) for end in chain] + [("a", "b")]
    ids = {text: at for at, text in enumerate(vocabulary)}
    inner = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return save(folder, inner, [special("<unk>"), *SPECIALS])


def unigram(folder):
    """Marks are pieces of the vocabulary, and the likeliest reading of their text."""
    vocabulary = [("<unk>", 0.0), *((text, -5.0) for text in pieces()), (START, -0.1), (END, -0.1)]
    inner = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    return save(folder, inner, [special("<unk>"), *SPECIALS])


def normalized(folder):
    letters = {text: at for at, text in enumerate(pieces())}
    inner = Tokenizer(models.BPE(letters, []))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokens = [special(START, normalized=True), special(END, lstrip=True)]
    return save(folder, inner, tokens)


def tiny(folder):
    folder.mkdir()
    write_tokenizer(folder)
    return ChatTokenizer(load(folder))


def bundled(name):
    return lambda _: ChatTokenizer(load(BUNDLED / name))


MAKERS = {
    "bytes": bytes_of_text,
    "merged": merged,
    "unigram": unigram,
    "normalized": normalized,
    "tiny": tiny,
    "recall": bundled("recall"),
    "prose": bundled("prose"),
}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request, tmp_path_factory):
    chosen = MAKERS[request.param](tmp_path_factory.mktemp("plain") / "t")
    chosen.kind = request.param
    return chosen


def without_marks(tokenizer):
    """Return the tokenizer as if it had never had its control marks."""
    plain, marks = json.loads(tokenizer.definition), set(tokenizer.control_marks.ids)
    lost = {text: f"\ue777{at}" for at, text in enumerate(sorted(marks))}  # in no text
    plain["added_tokens"] = [each for each in plain["added_tokens"] if each["content"] not in marks]
    plain_encoder._rename(plain["model"], lost)
    return Tokenizer.from_str(json.dumps(plain))


WORDS = st.lists(
    st.one_of(
        st.sampled_from(["a", "ab", " b", "\n", "  ", "é", "🦊", "<|im_", "end|>", "<", "user"]),
        st.integers(0, 10),  # one of the marks, as text
    ),
    max_size=8,
)
FRAME = st.lists(st.tuples(st.integers(0, 10), WORDS), max_size=6)


def spell_frame(tokenizer, frame):
    """Return a text with marks of a frame, each followed by words; and its plain marks."""
    marks = sorted(tokenizer.control_marks.ids)
    text, plain, parts = "", [], []
    for mark, words in frame:
        text += marks[mark % len(marks)]
        own = "".join(marks[each % len(marks)] if isinstance(each, int) else each for each in words)
        places = MarkFinder(marks).places(own)
        plain += [len((text + own[:place]).encode()) for place in places]
        text += own
        parts.append((marks[mark % len(marks)], own))
    return text, plain, parts


@given(frame=FRAME)
@settings(max_examples=100)
def test_plain_marks_are_encoded_as_by_a_tokenizer_without_marks(tokenizer, frame):
    text, plain, parts = spell_frame(tokenizer, frame)
    encoded = tokenizer.encode(text, plain=plain)

    control = set(tokenizer.control_marks.ids.values())
    wanted = [tokenizer.control_marks.ids[mark] for mark, _ in parts]
    assert [token for token in encoded.ids if token in control] == wanted
    assert encoded.ends == sorted(encoded.ends)
    if tokenizer.kind in ("bytes", "tiny", "recall", "prose") and EATS not in text:
        bare = without_marks(tokenizer)
        expected = []
        for mark, words in parts:
            expected += [tokenizer.control_marks.ids[mark], *bare.encode(words).ids]
        assert encoded.ids == expected
        assert tokenizer.decode(encoded.ids) == text


@given(frame=FRAME, cut=st.integers(0, 5))
@settings(max_examples=100)
def test_encoding_in_pieces_equals_encoding_the_whole(tokenizer, frame, cut):
    text, plain, _ = spell_frame(tokenizer, frame)

    assert tokenizer.encode(text, plain=plain, limit=NO_LIMIT) == tokenizer.encode(
        text, plain=plain
    )


@given(frame=FRAME)
@settings(max_examples=100)
def test_both_encoders_agree_on_text_without_plain_marks(tokenizer, frame):
    text, _, _ = spell_frame(tokenizer, frame)
    encoded = tokenizer._encode_piece(text, None, 0)

    assert tokenizer._plain_encoder.encode(text, ()) == encoded


def test_added_tokens_for_common_text_are_not_control_marks(tmp_path):
    tokens = [*SPECIALS, *(AddedToken(text, normalized=False) for text in ("\n\n", "<h1>", "<t>"))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({text: at for at, text in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    saved = save(tmp_path / "t", inner, tokens, template="{{ '<t>' }}")

    assert set(saved.control_marks.ids) == {START, END, "<t>"}


def test_unsupported_normalizer_sets_a_warning_and_encodes_as_before(tmp_path):
    """The normalizer removes private characters, so that no token can be named by them."""
    letters = {text: at for at, text in enumerate(pieces())}
    inner = Tokenizer(models.BPE(letters, []))
    inner.normalizer = normalizers.BertNormalizer(lowercase=False)
    saved = save(tmp_path / "t", inner, [special(START, normalized=True)])
    text = f"{START}a{START}"
    assert saved.warning is None

    assert saved.encode(text, plain=[len(START) + 1]) == saved.encode(text)
    assert saved.warning == PROBLEM

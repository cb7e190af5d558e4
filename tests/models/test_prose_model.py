"""The bundled prose model loads, is trained, and never saw its test text."""

import json
import math
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

from benchmarks.models import prose_card, prose_eval, prose_model, prose_text, prose_train

FOLDER = Path(__file__).resolve().parents[2] / "node" / "bundled" / "prose"
WINDOW, WINDOWS = 512, 3


@pytest.fixture(scope="module")
def loaded():
    return mlx_lm.load(str(FOLDER))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def held_out():
    return prose_text.held_out_documents()


@pytest.fixture(scope="module")
def held_out_windows(tokenizer, held_out):
    """Return windows of whole topics, which are nearly equal under every Python version."""
    topics = [document for document in held_out if document.name.startswith("topic:")]
    return prose_eval.windows(prose_model.encode(tokenizer, topics), WINDOW, WINDOWS)


@pytest.fixture(scope="module")
def full_losses(loaded, held_out_windows):
    return prose_eval.token_losses(loaded[0], held_out_windows)


def test_loads_as_plain_float32_llama(loaded):
    model, _ = loaded
    parameters = dict(tree_flatten(model.parameters()))

    assert {array.dtype for array in parameters.values()} == {mx.float32}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6_200_000
    assert model.layers[0].self_attn.k_proj.weight.shape[0] == 2 * 64  # two KV heads of 64


def test_model_card_figures_belong_to_the_weights():
    card = json.loads((FOLDER / "prose.json").read_text(encoding="utf-8"))

    assert card["weights"] == prose_card.weights_digest(FOLDER)
    assert card["held_out"]["digest"] != card["training"]["digest"]


def test_tokenizer_keeps_every_byte(tokenizer, held_out):
    text = held_out[0].text + "naïve – 日本語 🙂\t\r\n  end"
    ids = tokenizer.encode(text).ids

    assert tokenizer.decode(ids) == text
    assert prose_eval.byte_lengths(tokenizer)[ids].sum() == len(text.encode())


def test_chat_template_joins_contents(loaded):
    _, tokenizer = loaded
    messages = [{"role": "system", "content": "One."}, {"role": "user", "content": "Two."}]

    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    assert rendered == "One.\n\nTwo."


@pytest.mark.nightly
def test_predicts_unseen_prose_far_better_than_word_counts(full_losses, held_out_windows):
    """The baseline has an advantage: it is fitted to the tokens on which it is evaluated."""
    perplexity = math.exp(full_losses.mean())

    assert perplexity < prose_eval.unigram_perplexity(held_out_windows) / 4


@pytest.mark.nightly
def test_longer_context_lowers_loss(loaded, full_losses, held_out_windows):
    """The same 128 tokens of each window, with 384 and with 16 tokens before them."""
    short = prose_eval.token_losses(loaded[0], held_out_windows[:, -(128 + 16 + 1) :])

    assert full_losses[:, -128:].mean() < short[:, -128:].mean() - 0.05


@pytest.mark.nightly
def test_repeated_passage_has_lower_loss(loaded, held_out_windows):
    """The model attends to its cache, so damage to the cache is detectable."""
    passage = held_out_windows[:, :96]
    losses = prose_eval.token_losses(loaded[0], np.concatenate([passage, passage], axis=1))

    assert losses[:, 104:].mean() < losses[:, 8:95].mean() - 0.5


def test_training_copies_a_passage_to_a_later_place():
    for seed in range(50):
        window = np.arange(513)
        prose_train.copy_passage(window, np.random.default_rng(seed))
        changed = np.flatnonzero(window != np.arange(513))

        assert len(changed) >= 24
        assert (np.diff(changed) == 1).all()
        assert (np.diff(window[changed]) == 1).all()
        assert window[changed[-1]] < changed[0]


@pytest.mark.nightly
def test_four_bit_kv_changes_loss_only_slightly(loaded, full_losses, held_out_windows):
    chosen = held_out_windows[:1]
    quantized = prose_eval.token_losses(loaded[0], chosen, "q4_g64")

    assert not np.array_equal(quantized, full_losses[:1])
    assert abs(quantized.mean() - full_losses[:1].mean()) < 0.2


@pytest.mark.nightly
def test_split_is_by_name_and_disjoint(held_out):
    training = prose_text.training_documents(every=12)
    runs = [prose_text.shingles(paragraph) for paragraph in _paragraphs(held_out)]
    measured = set().union(*runs)

    assert not {d.name for d in held_out} & {d.name for d in training}
    assert all(prose_text.is_held_out(document.name) for document in held_out)
    assert not any(prose_text.is_held_out(document.name) for document in training)
    assert len(measured) > 10_000
    for paragraph in _paragraphs(training):
        assert measured.isdisjoint(prose_text.shingles(paragraph))


def test_tests_of_python_are_never_held_out():
    assert not any(prose_text.is_held_out(f"test.test_{number}") for number in range(200))
    share = sum(prose_text.is_held_out(f"module{number}") for number in range(5000)) / 5000
    assert share == pytest.approx(prose_text.HELD_OUT_PERCENT / 100, abs=0.015)


def test_module_prose_is_in_source_order():
    source = '"""Say hello."""\n\n# This comment is long enough to be kept as prose here.\n'
    source += 'class A:\n    def f(self):\n        """Return it."""\n        x = "# no"\n'

    assert prose_text.module_prose(source, "greet") == (
        "greet\nSay hello.\n\nThis comment is long enough to be kept as prose here.\n\n"
        "A.f\nReturn it."
    )


def test_greedy_generation_is_deterministic_and_not_stuck(loaded):
    model, tokenizer = loaded
    once, again = (
        prose_eval.continuation(model, tokenizer, prose_eval.PROMPTS[0], 24) for _ in range(2)
    )

    assert once == again
    assert len(set(once.split())) > 5


def _paragraphs(documents):
    return [paragraph for d in documents for paragraph in d.text.split("\n\n")]

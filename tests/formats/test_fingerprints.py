"""A model's fingerprint never changes: block names and folders follow from it.

All expected values come from code that hashed Python's own text of the layout.
"""

from dataclasses import fields, replace

import mlx.core as mx
import mlx_lm
import pytest

from fabric.kvcache import fingerprint
from fabric.kvcache.cache_spec import LayerKind, ModelCacheSpec
from fabric.kvcache.fingerprint import KIND_WORDS, WORDS, TextFile, WeightFile, model_fingerprint
from fabric.settings import KvBits
from node.mlx import backend, loaded_model
from node.mlx.loaded_model import load_model
from node.mlx.probe.probe import fit_engine
from tests.formats.samples import NUMERICS, SPEC
from tests.support.tiny_models import build_model
from tests.support.zoo import zoo

WEIGHTS = [WeightFile("model.safetensors", 17, b"w" * 16)]
TEXTS = [TextFile("config.json", b"c" * 16)]


def fingerprint_of(spec: ModelCacheSpec) -> str:
    """Return the fingerprint of these caches under files of no model."""
    return model_fingerprint(WEIGHTS, TEXTS, spec, NUMERICS).hex()


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("recall", "ec15ace788ef8479eed574b828155d6985b212f53312f9f9ee417eb79f9c10f2"),
        ("prose", "69018fe376209e5f7054b73e616b5a461b8e605952269aa520bcc8e6a33a8374"),
    ],
)
def test_bundled_models_keep_their_fingerprints(
    name: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored agents of the bundled models are found again."""
    monkeypatch.setattr(loaded_model, "numerics_tag", lambda: NUMERICS)

    assert load_model(name).fingerprint.hex() == known


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("llama", "3baf1b7274666bd1fdcd31bd9b11d8531d13210065a75a6f0949a31f697fc20c"),
        ("qwen3_5", "224aaad9e00e21e66dcf48fb8b14e2817ddaf885ea5ccf93cdf7d744ffbc1634"),
        ("gemma3_text", "4661d79415987f4609ebffa6c92100e261e2cf83fe5a87612c3476bad6e01aa9"),
        ("deepseek_v3", "574886c05c428b0fb199a211ddd0a90387cc7a09a094c710707c83ce7735ad84"),
        ("gpt2", "69e53512eda1b7ea5a45fad1964a1e2afc6f18bd90ce0d8da4d9bb3df116373e"),
    ],
)
def test_architectures_keep_their_layout(name: str, known: str) -> None:
    """Layouts are as the probe reads them from a model: another kind or slot is another folder.

    So is another reason for unknown positions (GPT-2's).
    """
    assert fingerprint_of(fit_engine(build_model(zoo()[name]), KvBits()).spec) == known


def test_every_layout_field_has_a_word() -> None:
    """Every field has a word, or two layouts could share a folder."""
    for kind, (_, words) in WORDS.items():
        assert len(words) == len(fields(kind)), kind.__name__
    assert KIND_WORDS.keys() == set(LayerKind)


def test_layout_version_changes_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words' meaning can change without confusing old blocks with new ones."""
    before = fingerprint_of(SPEC)
    monkeypatch.setattr(fingerprint, "LAYOUT_VERSION", 2)

    assert fingerprint_of(SPEC) != before


def test_numerics_tag_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag is that of the first stores' machine, including the words around the versions."""
    monkeypatch.setattr(mx, "__version__", "0.32.4")
    monkeypatch.setattr(mlx_lm, "__version__", "0.32.2")
    monkeypatch.setattr(backend, "current", lambda: replace(backend.CPU, name="cpu-linux"))
    monkeypatch.setattr(loaded_model, "NUMERICS_VERSION", 1)

    assert loaded_model.numerics_tag() == NUMERICS

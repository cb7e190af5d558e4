"""A model is tried on our caches when it is loaded."""

from typing import Any

import mlx.core as mx
import pytest

from fabric.errors import FatalError
from fabric.settings import KvBits
from node.mlx.engine import Batching, Engine
from node.mlx.model_spec import read_spec
from node.mlx.probe import fit_engine
from node.mlx.resident_layer import ResidentLayer
from tests.support.architectures import ARCHITECTURES, OPAQUE
from tests.support.tiny_models import LLAMA, build_model


def fit(config: dict[str, Any], bits: KvBits = KvBits()) -> Engine:  # noqa: B008 - frozen
    """Fit an engine to a tiny random model."""
    return fit_engine(build_model(config), bits)


def test_plain_attention_gets_packed_and_ragged_caches() -> None:
    """A llama takes the fastest of everything."""
    engine = fit(LLAMA)

    assert engine.packed
    assert engine.batching is Batching.RAGGED


def test_latent_attention_gets_plain_numbers_and_more_bits() -> None:
    """Attention that computes with what it fetches cannot take packed or ragged caches."""
    engine = fit(ARCHITECTURES["deepseek_v3"])

    assert not engine.packed
    assert engine.batching is Batching.PADDED
    assert {slot.bits for layer in engine.spec.layers for slot in layer.slots} == {8}


def test_bits_are_chosen_per_class() -> None:
    """What an operator sets is what is stored; 0 keeps the model's own numbers."""
    gemma = fit(ARCHITECTURES["gemma3_text"], KvBits(full=8, window=4))
    native = fit(ARCHITECTURES["deepseek_v3"], KvBits(latent=0))

    assert [layer.slots[0].bits for layer in gemma.spec.layers] == [4, 4, 8, 4, 4, 8]
    assert native.spec.layers[0].tensors(0, 1)[0].dtype == "F32"
    assert len(native.spec.layers[0].tensors(0, 1)) == 2


def test_unknown_caches_are_refused_by_kind() -> None:
    """A cache that nobody here can cut is named, not guessed at."""
    with pytest.raises(FatalError, match="ChunkedKVCache"):
        fit(OPAQUE)


def test_a_model_that_computes_something_else_on_our_caches_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison with mlx-lm's own caches is real: an off-by-one mask does not pass."""
    mask = ResidentLayer.make_mask

    def blind(layer: Any, n: int, **options: Any) -> Any:
        made = mask(layer, n, return_array=True, window_size=None)
        return made if n == 1 else made & (mx.arange(made.shape[-1]) > 0)

    monkeypatch.setattr(ResidentLayer, "make_mask", blind)
    with pytest.raises(FatalError, match="something else"):
        fit(LLAMA)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_a_window_off_by_one_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe looks past the end of a window, where it can."""
    read = read_spec

    def narrower(model: Any, bits: KvBits) -> Any:
        spec = read(model, bits)
        for layer in spec.layers:
            if layer.window_tokens:
                object.__setattr__(layer, "window_tokens", layer.window_tokens - 1)
        return spec

    monkeypatch.setattr("node.mlx.probe.read_spec", narrower)
    with pytest.raises(FatalError, match="something else"):
        fit(ARCHITECTURES[name])


def test_batches_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch computes something else than its sequences alone, it is not used."""
    forward = Engine._forward

    def wrong(engine: Engine, caches: list[Any], tokens: list[Any]) -> Any:
        logits = forward(engine, caches, tokens)
        return -logits if len(caches) > 1 and engine.batching is not Batching.ALONE else logits

    monkeypatch.setattr(Engine, "_forward", wrong)

    assert fit(LLAMA).batching is Batching.ALONE


def test_where_positions_are_is_known_for_every_layer() -> None:
    """The spec says which dimensions carry the position, for every layer that has any."""
    layers = fit(ARCHITECTURES["deepseek_v32"]).spec.layers

    assert not any(layer.rotations_unknown for layer in layers)
    assert [(r.slot, r.start, r.dims) for r in layers[0].rotations] == [("values", 0, 64)]
    assert [(r.slot, r.start, r.dims) for r in layers[1].rotations] == [("index", 0, 64)]

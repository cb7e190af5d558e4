"""Trials of a model on our caches when it is loaded."""

from typing import Any

import mlx.core as mx
import pytest

from fabric.errors import FatalError
from fabric.record.spec_file import SpecRecord, decode_spec, encode_spec
from fabric.settings import KvBits
from node.mlx import attention
from node.mlx.attention import LastTokens, Rows, attend
from node.mlx.batch_layers import PaddedLayer, RaggedLayer
from node.mlx.engine import Batching, Engine
from node.mlx.model_spec import read_spec
from node.mlx.probe.probe import fit_engine
from node.mlx.resident_layer import ResidentLayer
from tests.support.architectures import ARCHITECTURES, CHUNKED, LLAMA, OPAQUE
from tests.support.blocks import FINGERPRINT
from tests.support.tiny_models import build_model
from tests.support.zoo import zoo

ZOO = zoo()


def fit(config: dict[str, Any], bits: KvBits = KvBits()) -> Engine:  # noqa: B008 - frozen
    """Fit an engine to a tiny random model."""
    return fit_engine(build_model(config), bits)


def test_plain_attention_gets_packed_and_ragged_caches() -> None:
    """A llama gets the fastest form of every cache."""
    engine = fit(LLAMA)

    assert engine.packed
    assert engine.batching is Batching.RAGGED


def test_latent_attention_gets_unpacked_caches_and_more_bits() -> None:
    """Attention that computes with the fetched arrays cannot use packed or ragged caches."""
    engine = fit(ARCHITECTURES["deepseek_v3"])

    assert not engine.packed
    assert engine.batching is Batching.PADDED
    assert {slot.bits for layer in engine.spec.layers for slot in layer.slots} == {8}


def test_bits_are_chosen_per_layer_kind() -> None:
    """The operator's bits are stored; 0 keeps the model's own dtype."""
    gemma = fit(ARCHITECTURES["gemma3_text"], KvBits(full=8, window=4))
    native = fit(ARCHITECTURES["deepseek_v3"], KvBits(latent=0))

    assert [layer.slots[0].bits for layer in gemma.spec.layers] == [4, 4, 8, 4, 4, 8]
    assert native.spec.layers[0].tensors(0, 1)[0].dtype == "F32"
    assert len(native.spec.layers[0].tensors(0, 1)) == 2


def test_unknown_cache_kinds_are_refused_by_name() -> None:
    """A cache kind that cannot be cut is named in the error."""
    with pytest.raises(FatalError, match="LayerCache"):
        fit(OPAQUE)


def test_model_with_different_logits_on_our_caches_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison with mlx-lm's own caches is real: an off-by-one mask does not pass."""
    mask = ResidentLayer.make_mask

    def blind(layer: Any, n: int, **options: Any) -> Any:
        shown = mask(layer, n, return_array=True, window_size=None)
        return shown if n == 1 else shown & (mx.arange(shown.shape[-1]) > 0)

    monkeypatch.setattr(ResidentLayer, "make_mask", blind)
    with pytest.raises(FatalError, match="different logits"):
        fit(LLAMA)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_window_off_by_one_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe looks past the end of a window, where it can."""
    read = read_spec

    def narrower(model: Any, bits: KvBits) -> Any:
        spec = read(model, bits)
        for layer in spec.layers:
            if layer.window_tokens:
                object.__setattr__(layer, "window_tokens", layer.window_tokens - 1)
        return spec

    monkeypatch.setattr("node.mlx.probe.probe.read_spec", narrower)
    with pytest.raises(FatalError, match="different logits"):
        fit(ARCHITECTURES[name])


def test_batching_with_different_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batching is off if a batch computes other logits than its sequences alone."""
    forward = Engine._forward

    def wrong(engine: Engine, caches: list[Any], tokens: list[Any]) -> Any:
        logits = forward(engine, caches, tokens)
        return -logits if len(caches) > 1 and engine.batching is not Batching.ALONE else logits

    monkeypatch.setattr(Engine, "_forward", wrong)

    assert fit(LLAMA).batching is Batching.ALONE


@pytest.mark.nightly
def test_batching_with_different_logits_past_a_window_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Masks matter only past a window or an index's budget, so the trial extends there."""
    windowed = ZOO["llama_windowed"] | {"sliding_window": 2_000}
    wrapped = {**ZOO["pixtral"], "text_config": windowed}
    indexed = ZOO["minimax_m3_vl"]

    assert fit(wrapped).batching is Batching.RAGGED
    assert (fit(indexed).batching, fit(indexed).padded_waste_max) == (Batching.PADDED, 1.0)
    monkeypatch.setattr(RaggedLayer, "make_mask", lambda *_, **__: None)
    monkeypatch.setattr(PaddedLayer, "make_mask", lambda *_, **__: None)
    assert fit(wrapped).batching is Batching.ALONE


def test_ragged_batch_refuses_the_models_own_mask() -> None:
    """Rows of unequal length cannot be masked by one array: an error, not a wrong answer."""
    rows = Rows([mx.ones((1, 2, 5, 32)), mx.ones((1, 2, 9, 32))])
    queries = mx.ones((2, 2, 1, 32))

    with pytest.raises(TypeError, match="the model's own mask"):
        attend(queries, rows, rows, None, 1.0, mx.ones((1, 9), mx.bool_))
    assert attend(queries, rows, rows, None, 1.0, LastTokens(3)).shape == (2, 2, 1, 32)


def test_chunks_padding_cannot_hide_are_decoded_alone() -> None:
    """The trial includes sequences of very unequal length."""
    engine = fit(CHUNKED)
    assert engine.batching is Batching.ALONE
    assert any(layer.is_chunked for layer in engine.spec.layers)


def test_gemma_2_decodes_in_grouped_batches() -> None:
    """Gemma 2's scores and mask have an axis for the query heads of one key head."""
    assert fit(ZOO["gemma2"]).batching is Batching.GROUPED


def test_packed_attention_is_compared_call_by_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deep 16-bit model amplifies tiny differences; an error shows in any single call."""
    model = build_model(ARCHITECTURES["gemma3_text"])
    model.set_dtype(mx.bfloat16)
    assert fit_engine(model, KvBits()).packed
    right = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", lambda *args: right(*args) * 1.2)
    assert not fit_engine(model, KvBits()).packed
    assert not fit(LLAMA).packed


def test_blocks_over_the_limit_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a model is served without reuse; the node starts."""
    monkeypatch.setattr("fabric.record.spec_file.BLOCK_BYTES_MAX", 1 << 17)
    with pytest.raises(FatalError, match="full block is over the limit"):
        fit(LLAMA)


@pytest.mark.parametrize(
    "name", ["read_spec", "_upstream_logits", "read_rotations", "find_batching"]
)
def test_any_exception_in_a_trial_becomes_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No failure of a model in a trial keeps a node from starting."""

    def broken(*_: Any) -> None:
        message = "of an unexpected kind"
        raise AttributeError(message)

    monkeypatch.setattr(f"node.mlx.probe.probe.{name}", broken)
    with pytest.raises(FatalError, match="AttributeError: of an unexpected kind"):
        fit(LLAMA)


def test_layers_without_a_cache_get_no_slots() -> None:
    """Nemotron-NAS makes a cache for a linear layer, and never writes it."""
    engine = fit(ZOO["nemotron-nas_linear_first"])
    assert not engine.spec.layers[0].slots
    assert engine.batching is Batching.RAGGED
    assert decode_spec(encode_spec(SpecRecord(FINGERPRINT, "", engine.spec))).spec == engine.spec


def test_rotations_of_cache_lists_are_known() -> None:
    """LongCat has two latents per layer, each with its own rotation."""
    layers = fit(ZOO["longcat_flash"]).spec.layers
    assert len(layers) == 8
    assert not any(layer.rotations_unknown for layer in layers)
    assert {tuple(r.slot for r in layer.rotations) for layer in layers} == {("values",)}


def test_rotations_are_known_for_every_layer() -> None:
    """The spec lists the rotated dimensions of every layer that has any."""
    layers = fit(ARCHITECTURES["deepseek_v32"]).spec.layers

    assert not any(layer.rotations_unknown for layer in layers)
    assert [(r.slot, r.start, r.dims) for r in layers[0].rotations] == [("values", 0, 64)]
    assert [(r.slot, r.start, r.dims) for r in layers[1].rotations] == [("index", 0, 64)]

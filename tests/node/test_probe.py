"""A model is tried on our caches when it is loaded."""

from typing import Any

import pytest

from fabric.errors import FatalError
from node.mlx.engine import Engine
from node.mlx.loaded_model import read_spec
from node.mlx.probe import probe
from tests.support.tiny_models import LLAMA, build_model

LATENT: dict[str, Any] = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 128,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "rope_scaling": None,
}


def engine_of(config: dict[str, Any]) -> Engine:
    """Build an engine over a tiny random model."""
    model = build_model(config)
    return Engine(model, read_spec(model))


def test_plain_attention_may_batch() -> None:
    """A llama passes and keeps its ragged batches."""
    engine = engine_of(LLAMA)
    probe(engine)

    assert engine.can_batch


def test_latent_attention_is_refused_clearly() -> None:
    """A model that cannot take packed caches does not start, and says why."""
    with pytest.raises(FatalError, match="4-bit caches"):
        probe(engine_of(LATENT))


def test_batches_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch decodes something else than its sequences alone, it is not used."""
    engine = engine_of(LLAMA)
    forward = engine._forward

    def wrong(slots: Any) -> Any:
        logits = forward(slots)
        return logits if len(slots) == 1 else -logits

    monkeypatch.setattr(engine, "_forward", wrong)
    probe(engine)

    assert not engine.can_batch

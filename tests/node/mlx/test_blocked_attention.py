"""Attention in blocks of tokens computes what attention to all tokens at once does."""

import mlx.core as mx
import numpy as np
import pytest

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, SlotSpec
from node.mlx import attention, blocked_attention
from node.mlx.attention import attend
from node.mlx.packed_product import (
    FORM_TOKENS_MIN,
    PACKED,
    PACKED_QUERIES_MAX,
    Forms,
    ValuesForm,
    use_forms,
)
from node.mlx.resident_layer import ResidentLayer
from node.mlx.token_store import Packed, TokenStore

BY_POWERS = Forms(ValuesForm.UNPACKED, 1, softmax_by_powers=True)
HEADS, KV_HEADS, WIDTH, TOKENS, COUNT = 6, 2, 64, 700, 40


@pytest.fixture(autouse=True)
def _packed_again():
    yield
    use_forms(PACKED)


@pytest.fixture(autouse=True)
def lengths(monkeypatch):
    """Compute in blocks of about 100 tokens; return the lengths of those computed."""
    lengths, sums_of = [], blocked_attention._sums_of

    def record(scores, values):
        lengths.append(scores.shape[-1])
        return sums_of(scores, values)

    monkeypatch.setattr(blocked_attention, "BLOCK_TOKENS_MIN", 100)
    monkeypatch.setattr(blocked_attention, "BLOCK_SCORES", 100 * HEADS * COUNT)
    monkeypatch.setattr(blocked_attention, "_sums_of", record)
    return lengths


def normal(*shape, seed=1):
    return mx.random.normal(shape, key=mx.random.key(seed))


def packed(seed, tokens_count=TOKENS):
    store = TokenStore(SlotSpec("keys", KV_HEADS, WIDTH, 4, 64, "F32"), KV_HEADS, tokens_count)
    vectors = normal(1, KV_HEADS, tokens_count, WIDTH, seed=seed)
    store.write(store.encode(vectors), 0)
    return store.fetch(slice(0, KV_HEADS), 0, tokens_count)


def exact(queries, keys, values, scale, mask=None, sinks=None):
    """Attend in double precision; `mask` is added to `[batch, heads, n, tokens]`."""
    numbers = (each.dense() if isinstance(each, Packed) else each for each in (keys, values))
    q, k, v = (np.array(each, np.float64) for each in (queries, *numbers))
    k, v = (np.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    scores = scale * q @ k.swapaxes(-1, -2)
    scores = scores if mask is None else scores + np.array(mask, np.float64)
    weights = np.exp(scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.array(sinks, np.float64))[:, None, None]
    return weights @ v / total


def causal(count=COUNT, tokens_count=TOKENS, window=None):
    """Return which tokens the last ones attend to."""
    queries, tokens = (
        np.arange(tokens_count - count, tokens_count)[:, None],
        np.arange(tokens_count),
    )
    allowed = tokens <= queries
    return allowed & (tokens > queries - window) if window else allowed


def added(allowed):
    return np.where(allowed, 0.0, -np.inf)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_causal_attention_to_plain_numbers(lengths, batch, has_sinks):
    queries = normal(batch, HEADS, COUNT, WIDTH)
    keys, values = (normal(batch, KV_HEADS, TOKENS, WIDTH, seed=seed) for seed in (2, 3))
    sinks = normal(HEADS, seed=4) + 3.0 if has_sinks else None
    use_forms(BY_POWERS)
    out = attend(queries, keys, values, None, 0.125, "causal", sinks)

    assert np.allclose(out, exact(queries, keys, values, 0.125, added(causal()), sinks), atol=2e-6)
    assert lengths == [95] * 6 + [90, 40], "equal parts, then the queries' own tokens"


@pytest.mark.parametrize("has_sinks", [False, True])
def test_causal_attention_to_packed_vectors(lengths, has_sinks):
    queries, keys, values = normal(1, HEADS, COUNT, WIDTH), packed(2), packed(3)
    sinks = normal(HEADS, seed=4) + 3.0 if has_sinks else None
    use_forms(BY_POWERS)
    out = attend(queries, keys, values, None, 0.125, "causal", sinks)

    assert np.allclose(out, exact(queries, keys, values, 0.125, added(causal()), sinks), atol=2e-6)
    assert len(lengths) == 8


@pytest.mark.parametrize("dtype", ["allowed", "added", "by head", "by batch"])
def test_masks_that_hide_whole_blocks(dtype):
    queries, keys, values = normal(1, HEADS, COUNT, WIDTH), packed(2), packed(3)
    allowed = causal(window=150)
    mask = mx.array(allowed if dtype == "allowed" else added(allowed), dtype=None)
    mask = mask if dtype == "allowed" else mask.astype(mx.float32)
    if dtype == "by head":
        mask = mask[None, None] + normal(1, HEADS, 1, TOKENS)
    elif dtype == "by batch":
        mask = mask[None, None]
    use_forms(BY_POWERS)
    out = attend(queries, keys, values, None, 0.125, mask)

    expected = added(allowed) if dtype == "allowed" else mask
    assert np.allclose(out, exact(queries, keys, values, 0.125, expected), atol=2e-6)


def test_large_scores_do_not_overflow():
    queries, keys, values = 50 * normal(1, HEADS, COUNT, WIDTH), packed(2), packed(3)
    use_forms(BY_POWERS)
    out = attend(queries, keys, values, None, 1.0, "causal", mx.full((HEADS,), 900.0))
    use_forms(PACKED)
    plain = keys.dense(), values.dense()
    expected = attend(queries, *plain, None, 1.0, "causal", mx.full((HEADS,), 900.0))

    assert np.isfinite(np.array(out)).all()
    assert np.allclose(out, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("forms", "count", "tokens_count", "dtype", "is_blocked"),
    [
        (BY_POWERS, PACKED_QUERIES_MAX + 1, FORM_TOKENS_MIN, mx.float32, True),
        (BY_POWERS, FORM_TOKENS_MIN, FORM_TOKENS_MIN, mx.float32, True),
        (BY_POWERS, PACKED_QUERIES_MAX, FORM_TOKENS_MIN, mx.float32, False),
        (BY_POWERS, PACKED_QUERIES_MAX + 1, FORM_TOKENS_MIN - 1, mx.float32, False),
        (BY_POWERS, PACKED_QUERIES_MAX + 1, FORM_TOKENS_MIN, mx.float16, False),
        (PACKED, PACKED_QUERIES_MAX + 1, FORM_TOKENS_MIN, mx.float32, False),
    ],
)
def test_blocks_are_for_many_queries_of_single_precision(
    lengths, forms, count, tokens_count, dtype, is_blocked
):
    queries = normal(1, HEADS, count, WIDTH).astype(dtype)
    keys, values = (
        normal(1, KV_HEADS, tokens_count, WIDTH, seed=seed).astype(dtype) for seed in (2, 3)
    )
    use_forms(forms)
    attend(queries, keys, values, None, 0.125, "causal")

    assert bool(lengths) is is_blocked


@pytest.mark.parametrize("forms", [PACKED, BY_POWERS])
@pytest.mark.parametrize("held", [0, 1_000])
@pytest.mark.parametrize("count", [1, 16, 17, 512])
def test_fetched_vectors_stay_packed_for_products_and_blocks(forms, held, count):
    slot = SlotSpec("keys", KV_HEADS, WIDTH, 4, 64, "F32")
    layer = ResidentLayer(LayerSpec(LayerKind.FULL, (slot, slot)), 256, packed=True)
    use_forms(forms)
    for added_count in filter(None, (held, count)):
        vectors = normal(1, KV_HEADS, added_count, WIDTH)
        keys, values = layer.append(layer.encode(vectors, vectors), added_count)

    is_blocked = forms is BY_POWERS and count > 16 and held + count >= FORM_TOKENS_MIN
    is_packed = count <= 16 or is_blocked
    assert isinstance(keys, Packed) is isinstance(values, Packed) is is_packed


def test_difference_from_plain_attention_is_observed_in_blocks(lengths):
    queries, keys, values = normal(1, HEADS, COUNT, WIDTH), packed(2), packed(3)
    use_forms(BY_POWERS)
    with attention.comparing() as differences:
        attend(queries, keys, values, None, 0.125, "causal")

    assert lengths
    assert 0.0 < differences[0].item() < 1e-4

"""All forms of a product with packed vectors compute the same."""

import mlx.core as mx
import numpy as np
import pytest

from fabric.kvcache.cache_spec import SlotSpec
from node.mlx.packed_attention import packed_attention, packed_attention_of_rows
from node.mlx.packed_product import (
    FORM_TOKENS_MIN,
    PACKED,
    UNPACKED_NUMBERS,
    Forms,
    ValuesForm,
    keys_product,
    softmax,
    use_forms,
    values_product,
)
from node.mlx.token_store import TokenStore

UNPACKED = Forms(ValuesForm.UNPACKED, 1, softmax_by_powers=True)
LONG = 2 * UNPACKED_NUMBERS // 128 + 1_001  # of two heads of 64: several parts


def packed(tokens_count, seed, width=64, bits=4, dtype="F32"):
    store = TokenStore(SlotSpec("keys", 2, width, bits, 64, dtype), 2, tokens_count)
    store.write(store.encode(store.random(tokens_count, mx.random.key(seed))), 0)
    return store.fetch(slice(0, 2), 0, tokens_count)


def normal(*shape, seed=1):
    return mx.random.normal(shape, key=mx.random.key(seed))


def exact(left, right):
    """Multiply in double precision."""
    return np.array(left, np.float64) @ np.array(right, np.float64)


@pytest.fixture
def quantized(monkeypatch):
    """Record the axes of each packed product's first factor."""
    calls, product = [], mx.quantized_matmul

    def call(x, *arguments, **named):
        calls.append(x.ndim)
        return product(x, *arguments, **named)

    monkeypatch.setattr(mx, "quantized_matmul", call)
    return calls


@pytest.fixture(autouse=True)
def _packed_again():
    yield
    use_forms(PACKED)


@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("tokens_count", [FORM_TOKENS_MIN, 777, LONG])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_unpacked_keys_are_as_exact_as_packed_ones(quantized, width, tokens_count, rows):
    keys, queries = packed(tokens_count, 2, width), normal(1, 2, rows, width)
    truth = exact(queries, keys.dense().swapaxes(-1, -2))
    unpacked = keys_product(queries, keys, UNPACKED)

    assert not quantized
    assert unpacked.shape == (1, 2, rows, tokens_count)
    errors = [
        np.abs(np.array(product) - truth).max()
        for product in (unpacked, keys_product(queries, keys, PACKED))
    ]
    assert errors[0] < max(2 * errors[1], 1e-5 * np.abs(truth).max())


@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("tokens_count", [FORM_TOKENS_MIN, 777, LONG])
@pytest.mark.parametrize("form", list(ValuesForm))
@pytest.mark.parametrize("rows", [2, 4, 16])
def test_all_forms_of_values_compute_the_same(quantized, width, tokens_count, form, rows):
    weights = mx.softmax(normal(1, 2, rows, tokens_count), axis=-1)
    values = packed(tokens_count, 3, width)
    product = values_product(weights, values, form)

    assert quantized == {ValuesForm.FOLDED: [4], ValuesForm.APART: [5]}.get(form, [])
    assert product.shape == (1, 2, rows, width)
    np.testing.assert_allclose(np.array(product), exact(weights, values.dense()), atol=2e-6)


@pytest.mark.parametrize(
    ("tokens_count", "rows", "bits", "dtype"),
    [
        (FORM_TOKENS_MIN - 1, 4, 4, "F32"),
        (FORM_TOKENS_MIN, 4, 8, "F32"),
        (FORM_TOKENS_MIN, 4, 4, "F16"),
    ],
    ids=["few tokens", "8 bits", "16-bit numbers"],
)
def test_products_that_would_not_gain_stay_packed(quantized, tokens_count, rows, bits, dtype):
    vectors = packed(tokens_count, 4, bits=bits, dtype=dtype)
    queries = normal(1, 2, rows, 64).astype(vectors.scales.dtype)
    weights = normal(1, 2, rows, tokens_count).astype(vectors.scales.dtype)
    keys_product(queries, vectors, UNPACKED)
    values_product(weights, vectors, ValuesForm.UNPACKED)

    assert quantized == [4, 4]


def test_rows_below_the_minimum_stay_packed(quantized):
    vectors = packed(1_000, 4)
    keys_product(normal(1, 2, 3, 64), vectors, Forms(unpacked_key_rows_min=4))
    values_product(normal(1, 2, 1, 1_000), vectors, ValuesForm.UNPACKED)

    assert quantized == [4, 4]


@pytest.mark.parametrize("scale", [0.1, 5.0, 300.0])
def test_softmax_of_powers_is_as_exact_as_one_of_exponentials(monkeypatch, scale):
    scores = normal(1, 2, 4, 1_000) * scale
    shifted = np.array(scores, np.float64) - np.array(scores).max(-1, keepdims=True)
    truth = np.exp(shifted) / np.exp(shifted).sum(-1, keepdims=True)
    monkeypatch.setattr(mx, "softmax", None)

    np.testing.assert_allclose(np.array(softmax(scores, UNPACKED)), truth, atol=3e-6)


def test_softmax_of_powers_gives_masked_tokens_no_weight():
    scores = mx.where(mx.arange(1_000) < 400, normal(1, 2, 4, 1_000), mx.finfo(mx.float32).min)
    weights = softmax(scores, UNPACKED)

    assert mx.all(weights[..., 400:] == 0.0)
    assert mx.allclose(weights.sum(axis=-1), mx.array(1.0))


@pytest.mark.parametrize(
    ("dtype", "tokens_count"), [(mx.float16, 1_000), (mx.float32, FORM_TOKENS_MIN - 1)]
)
def test_softmax_is_mlx_own_where_powers_would_not_gain(monkeypatch, dtype, tokens_count):
    monkeypatch.setattr(mx, "power", None)
    scores = normal(1, 2, 4, tokens_count).astype(dtype)

    assert mx.array_equal(softmax(scores, UNPACKED), mx.softmax(scores, axis=-1, precise=True))


@pytest.mark.parametrize("forms", [UNPACKED, Forms(ValuesForm.APART)])
def test_attention_uses_the_chosen_forms(quantized, forms):
    queries, keys, values = normal(1, 8, 1, 64), packed(900, 5), packed(900, 6)
    before = packed_attention(queries, keys, values, 0.125, None)
    quantized.clear()
    use_forms(forms)
    after = packed_attention(queries, keys, values, 0.125, None)

    assert quantized == ([] if forms is UNPACKED else [4, 5])
    assert mx.allclose(before, after, rtol=1e-4, atol=1e-5)


def test_sequences_of_a_batch_have_the_bits_that_they_have_alone():
    use_forms(UNPACKED)
    queries = normal(2, 8, 1, 64)
    keys, values = [packed(900, 7), packed(LONG, 8)], [packed(900, 9), packed(LONG, 10)]
    together = packed_attention_of_rows(queries, keys, values, 0.125)

    for row in range(2):
        alone = packed_attention(queries[row : row + 1], keys[row], values[row], 0.125, None)
        assert mx.array_equal(together[row : row + 1], alone)

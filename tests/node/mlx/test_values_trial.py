"""Values are multiplied in the form that is faster here, and in either come out the same."""

import mlx.core as mx
import pytest

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec, SlotSpec
from node.mlx import values_trial
from node.mlx.packed_attention import ValuesForm, packed_attention, use_values_form, values_product
from node.mlx.token_store import TokenStore
from node.mlx.values_trial import choose_values_form
from tests.node.fake_engine import FakeClock

SLOT = SlotSpec("keys", 2, 64, 4, 64, "F32")
SPEC = ModelCacheSpec((LayerSpec(LayerKind.FULL, (SLOT, SLOT)),))


def packed(tokens_count, seed):
    store = TokenStore(SLOT, 2, tokens_count)
    store.write(store.encode(store.random(tokens_count, mx.random.key(seed))), 0)
    return store.fetch(slice(0, 2), 0, tokens_count)


@pytest.fixture(autouse=True)
def _folded_again():
    yield
    use_values_form(ValuesForm.FOLDED)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_both_forms_compute_the_same_product(rows):
    weights = mx.softmax(mx.random.normal((1, 2, rows, 300), key=mx.random.key(1)), axis=-1)
    folded, apart = (values_product(weights, packed(300, 2), form) for form in ValuesForm)

    assert folded.shape == apart.shape == (1, 2, rows, 64)
    assert mx.allclose(folded, apart, rtol=1e-4, atol=1e-5)


def test_attention_uses_the_chosen_form(monkeypatch):
    queries = mx.random.normal((1, 8, 1, 64), key=mx.random.key(3))
    keys, values = packed(200, 4), packed(200, 5)
    before = packed_attention(queries, keys, values, 0.125, None)
    products = []
    monkeypatch.setattr(
        mx, "quantized_matmul", noting(mx.quantized_matmul, lambda x: products.append(x.ndim))
    )
    use_values_form(ValuesForm.APART)

    after = packed_attention(queries, keys, values, 0.125, None)
    assert products == [4, 5]
    assert mx.allclose(before, after, rtol=1e-4, atol=1e-5)


def noting(function, note):
    def call(x, *arguments, **named):
        note(x)
        return function(x, *arguments, **named)

    return call


@pytest.mark.parametrize("faster", list(ValuesForm))
def test_faster_form_is_chosen(monkeypatch, faster):
    clock = FakeClock()

    def product(weights, values, form):
        clock.now_s += 1.0 if form is faster else 1.1
        return weights

    monkeypatch.setattr(values_trial, "values_product", product)

    assert choose_values_form(SPEC, 8, clock) is faster


@pytest.mark.parametrize(
    ("spec", "heads"), [(SPEC, 2), (ModelCacheSpec(()), 8)], ids=["one row", "nothing packed"]
)
def test_no_trial_without_a_choice(monkeypatch, spec, heads):
    monkeypatch.setattr(values_trial, "values_product", None)

    assert choose_values_form(spec, heads, FakeClock()) is ValuesForm.FOLDED

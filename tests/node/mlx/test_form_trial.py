"""The trial at start chooses the fastest form of each product."""

import mlx.core as mx
import pytest

from fabric.kvcache.cache_spec import LayerKind, LayerSpec, ModelCacheSpec, SlotSpec
from node.mlx import form_trial
from node.mlx.backend import CPU, METAL
from node.mlx.form_trial import choose_forms
from node.mlx.packed_product import PACKED, SLOW_KEY_ROWS_MIN, Forms, ValuesForm
from tests.node.fake_engine import FakeClock


def spec_of(bits=4, dtype="F32"):
    slot = SlotSpec("keys", 2, 64, bits, 64, dtype)
    return ModelCacheSpec((LayerSpec(LayerKind.FULL, (slot, slot)),))


def choose(monkeypatch, backend, faster, spec, heads=8, *, has_fast_powers=False):
    """Return the forms chosen where one form of values is faster, and the rows that were tried."""
    clock, rows = FakeClock(), set()

    def product(weights, values, form):
        rows.add(weights.shape[2])
        clock.now_s += 1.0 if form is faster else 1.1
        return weights

    def weights(scores, forms):
        clock.now_s += 1.0 if forms.softmax_by_powers is has_fast_powers else 1.1
        return scores

    monkeypatch.setattr(form_trial, "values_product", product)
    monkeypatch.setattr(form_trial, "softmax", weights)
    monkeypatch.setattr(form_trial, "current", lambda: backend)
    return choose_forms(spec, heads, clock), rows


@pytest.mark.parametrize("faster", [ValuesForm.FOLDED, ValuesForm.APART])
def test_gpu_uses_the_faster_of_the_packed_forms(monkeypatch, faster):
    forms, rows = choose(monkeypatch, METAL, faster, spec_of())

    assert (forms, rows) == (Forms(faster), {4})


def test_gpu_never_unpacks(monkeypatch):
    forms, _ = choose(monkeypatch, METAL, ValuesForm.UNPACKED, spec_of())

    assert forms.values is not ValuesForm.UNPACKED
    assert forms.unpacked_key_rows_min is None


def test_cpu_with_fast_products_unpacks_values_and_all_keys(monkeypatch):
    forms, rows = choose(monkeypatch, CPU, ValuesForm.UNPACKED, spec_of())

    assert (forms, rows) == (Forms(ValuesForm.UNPACKED, 1), {4})


def test_cpu_with_slow_products_unpacks_keys_of_many_rows(monkeypatch):
    forms, _ = choose(monkeypatch, CPU, ValuesForm.FOLDED, spec_of())

    assert forms == Forms(ValuesForm.FOLDED, SLOW_KEY_ROWS_MIN)


@pytest.mark.parametrize("has_fast_powers", [True, False])
def test_cpu_computes_a_softmax_in_the_faster_way(monkeypatch, has_fast_powers):
    spec, faster = spec_of(), ValuesForm.FOLDED
    forms, _ = choose(monkeypatch, CPU, faster, spec, has_fast_powers=has_fast_powers)

    assert forms.softmax_by_powers is has_fast_powers


def test_gpu_keeps_its_fused_softmax(monkeypatch):
    forms, _ = choose(monkeypatch, METAL, ValuesForm.APART, spec_of(), has_fast_powers=True)

    assert not forms.softmax_by_powers


def test_cpu_tries_several_rows_for_a_model_without_shared_heads(monkeypatch):
    forms, rows = choose(monkeypatch, CPU, ValuesForm.UNPACKED, spec_of(), heads=2)

    assert (forms, rows) == (Forms(ValuesForm.UNPACKED, 1), {4})


@pytest.mark.parametrize(
    ("backend", "spec", "heads"),
    [
        (METAL, spec_of(), 2),
        (METAL, ModelCacheSpec(()), 8),
        (CPU, ModelCacheSpec(()), 8),
        (CPU, spec_of(bits=8), 8),
        (CPU, spec_of(dtype="BF16"), 8),
    ],
    ids=["one row", "nothing packed", "nothing packed on CPU", "8 bits", "16-bit numbers"],
)
def test_no_trial_without_a_choice(monkeypatch, backend, spec, heads):
    assert choose(monkeypatch, backend, None, spec, heads) == (PACKED, set())


def test_timed_products_are_evaluated(monkeypatch):
    evaluated = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.extend(arrays))
    monkeypatch.setattr(form_trial, "values_product", lambda _weights, _values, form: form)
    monkeypatch.setattr(form_trial, "softmax", lambda _scores, forms: forms)
    choose_forms(spec_of(), 8, FakeClock())

    assert {ValuesForm.FOLDED, ValuesForm.UNPACKED} <= {*map(str, evaluated)}
    assert {PACKED, Forms(softmax_by_powers=True)} <= {
        each for each in evaluated if type(each) is Forms
    }

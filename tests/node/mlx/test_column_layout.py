"""Arrays stored column by column, as MLX's CPU wheels multiply fastest: no bit changes."""

import mlx.core as mx
import pytest
from mlx import nn

from node.mlx.backend import store_weights_by_columns, stored_by_columns
from node.mlx.loaded_model import load_model

pytestmark = pytest.mark.skipif(
    mx.default_device().type != mx.cpu, reason="on a GPU, arrays stay as they are"
)


def products(layer, rows):
    return layer.as_linear(rows) if isinstance(layer, nn.Embedding) else layer(rows)


def is_stored_by_columns(array):
    return memoryview(array).strides[-2:] == (4, 4 * array.shape[-2])


def test_loaded_model_stores_weights_by_columns():
    model = load_model("recall").engine.model.model

    assert is_stored_by_columns(model.embed_tokens.weight)
    assert is_stored_by_columns(model.layers[0].self_attn.q_proj.weight)


@pytest.mark.parametrize("rows_count", [1, 2, 3, 8, 63, 256])
@pytest.mark.parametrize("shape", [(144, 1900), (128, 4), (4, 144), (7, 3)], ids=str)
def test_layers_compute_the_same_bits_with_columns(shape, rows_count):
    inputs_count, outputs_count = shape
    rows = mx.random.normal((2, rows_count, inputs_count))
    for layer in (
        nn.Linear(inputs_count, outputs_count),
        nn.Linear(inputs_count, outputs_count, bias=False),
        nn.Embedding(outputs_count, inputs_count),
    ):
        before, weight = products(layer, rows), mx.array(layer.weight)
        mx.eval(before)
        store_weights_by_columns(layer)
        assert mx.array_equal(layer.weight, weight)
        assert mx.array_equal(products(layer, rows), before)


@pytest.mark.parametrize("heads_count", [2, 4])
@pytest.mark.parametrize("counts", [(8, 9), (63, 200), (200, 200), (64, 513)], ids=str)
def test_attention_computes_the_same_bits_with_columns(counts, heads_count):
    queries_count, tokens_count = counts
    queries = mx.random.normal((2, heads_count, queries_count, 64))
    keys, values = (mx.random.normal((2, 2, tokens_count, 64)) for _ in range(2))

    def attention(keys):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask="causal")

    assert mx.array_equal(attention(stored_by_columns(keys)), attention(keys))

"""The graph nodes that one more sequence adds to a step do not grow."""

import pytest

from benchmarks.graph_nodes import nodes_by_sequence
from node.mlx.loaded_model import load_model
from tests.support.architectures import ARCHITECTURES
from tests.support.tiny_models import write_model

# Writing takes 3, reading 6, attention 3, sinks 2. The rest, per layer, selects parts of them.
NODES_MAX = {"llama": 12.25, "gpt_oss": 14.25}


@pytest.mark.parametrize("name", NODES_MAX)
def test_graph_nodes_per_sequence_and_layer_are_bounded(tmp_path, name):
    engine = load_model(str(write_model(tmp_path / "model", ARCHITECTURES[name]))).engine

    assert 0 < nodes_by_sequence(engine) <= NODES_MAX[name]

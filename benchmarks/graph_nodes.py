"""Count graph nodes and Python time that one more sequence adds to a decode step.

A GPU idles if the host takes longer to build a step than the GPU to compute it. The figure is the
difference between steps of many and of few sequences, by layer and sequence: the rest is the
model's own. MLX's CPU backend builds normalization and rotation from many nodes each, Metal from
one; products with packed vectors have the form that a GPU computes.
"""

import io
import re
import time
from collections.abc import Callable
from statistics import median
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten

from benchmarks import workload
from node.mlx.engine import DecodeSlot, Engine
from node.mlx.packed_product import PACKED, chosen_forms, use_forms

FEW, MANY = 4, 8  # sequences
_TOKENS, _ROOM_TOKENS = 300, 64  # of each sequence's cache, and room for its answer
_TIMINGS = 9
_NODE = re.compile(r"shape=rectangle")


def nodes_by_sequence(engine: Engine) -> float:
    """Count the graph nodes that one more sequence adds to each layer of a step."""
    return _by_sequence(engine, lambda slots: float(_count_nodes(engine, slots)))


def host_us_by_sequence(engine: Engine) -> float:
    """Measure the host's microseconds that one more sequence adds to each layer of a step."""
    return 1e6 * _by_sequence(engine, lambda slots: _build_s(engine, slots))


def _by_sequence(engine: Engine, cost: Callable[[list[DecodeSlot]], float]) -> float:
    forms = chosen_forms()
    use_forms(PACKED)
    try:
        few, many = (
            cost(workload.filled_slots(engine, count, _TOKENS, _ROOM_TOKENS))
            for count in (FEW, MANY)
        )
    finally:
        use_forms(forms)
    return (many - few) / (MANY - FEW) / len(engine.spec.layers)


def _count_nodes(engine: Engine, slots: list[DecodeSlot]) -> int:
    graph = io.StringIO()
    with mock.patch.object(mx, "async_eval") as launched:
        engine.launch(engine.prepare(slots))
    arrays = [array for _, array in tree_flatten(launched.call_args.args)]
    mx.export_to_dot(graph, *arrays)
    return len(_NODE.findall(graph.getvalue()))


def _build_s(engine: Engine, slots: list[DecodeSlot]) -> float:
    spent_s = []
    for _ in range(_TIMINGS):
        with mock.patch.object(mx, "async_eval") as launched:
            began_s = time.perf_counter()
            engine.launch(engine.prepare(slots))
            spent_s.append(time.perf_counter() - began_s)
        mx.eval(launched.call_args.args)
    return median(spent_s)

"""A model on a planned machine: arrays are counted, chunks bounded, and the plan is kept."""

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from fabric.limits import GIB, KIB, MIB
from fabric.memory_plan import MachineMemory, MemoryPlan, plan_memory
from node.limits import PREFIX_COPIES, SCORES_COPIES
from node.mlx import backend, device
from node.mlx.loaded_model import load_model, weights_bytes
from node.mlx.probe import probe
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

HOT_BYTES, POOL_BYTES, STEP_BYTES = 512 * KIB, 1 * MIB, 1 * MIB


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny", ONE_LAYER))


def plan_of(model, **changes):
    plan = plan_memory(MachineMemory(16 * GIB, 11 * GIB, 499_000), weights_bytes(model))
    values = {name: getattr(plan, name) for name in MemoryPlan.__slots__}
    return MemoryPlan(**(values | changes))


def test_weights_take_as_much_memory_as_their_files(model):
    parameters = tree_flatten(load_model(model).engine.model.parameters())
    held_bytes = sum(array.nbytes for _, array in parameters)

    assert held_bytes <= weights_bytes(model) <= held_bytes + 64 * KIB, "files have a header, too"


def test_scores_are_counted_by_the_heads_of_the_queries(model):
    engine = load_model(model, memory=plan_of(model, prefill_bytes=64 * MIB)).engine
    heads = engine.model.args.num_attention_heads

    assert engine.pair_bytes == heads * 4, "float32"
    assert engine.pairs_max(0) == 64 * MIB // (heads * 4 * SCORES_COPIES)


def test_unpacked_prefix_is_deducted_from_the_memory_for_scores(model):
    engine = load_model(model, memory=plan_of(model, prefill_bytes=64 * MIB)).engine
    args = engine.model.args
    unpacked_bytes = 2 * args.num_key_value_heads * args.head_dim * 4  # keys and values, float32

    assert engine.prefix_bytes == PREFIX_COPIES * unpacked_bytes
    pair_bytes = engine.pair_bytes * SCORES_COPIES
    assert engine.pairs_max(1_000) == (64 * MIB - 1_000 * engine.prefix_bytes) // pair_bytes
    assert engine.pairs_max(10**9) == 0, "the smallest chunk is still computed"


def test_long_context_reserves_prefix_memory_from_hot_caches(model):
    plan = plan_of(model, prefill_bytes=4 * MIB, hot_bytes=64 * MIB, share_bytes=0)
    loaded = load_model(model, memory=plan)
    engine, memory = loaded.engine, loaded.memory

    assert memory.prefill_bytes == engine.prefix_bytes * loaded.context_tokens_max > 4 * MIB
    assert memory.hot_bytes + memory.prefill_bytes == 68 * MIB
    assert engine.prefill_bytes_max == memory.prefill_bytes


@pytest.mark.parametrize(("width", "here", "kept"), [
    (128, backend.METAL, False), (128, backend.CPU, True), (256, backend.METAL, True),
    (128, backend.CUDA, True),
])  # fmt: skip
def test_scores_of_fused_heads_take_no_memory_on_a_gpu(monkeypatch, width, here, kept):
    monkeypatch.setattr(backend, "current", lambda: here)
    call = probe.AttentionCall(None, has_sinks=False, heads=8, width=width, item_bytes=2)

    assert probe._pair_bytes([call]) == (16 if kept else 0)


def test_cache_arrays_count_towards_the_gpu_resource_limit(model):
    free = load_model(model, memory=plan_of(model, array_bytes_min=0)).engine
    counted = load_model(model, memory=plan_of(model, array_bytes_min=MIB)).engine

    assert free.new_cache(16).size_bytes < MIB
    arrays_count = sum(len(leaf.state) for leaf in counted.new_cache(16).leaves)
    assert counted.new_cache(16).size_bytes == arrays_count * MIB > 0


def test_200_turns_of_growing_agents_stay_within_the_plan(tmp_path, model):
    pool_before_bytes = mx.set_cache_limit(POOL_BYTES)
    try:
        with running(tmp_path, model, hot_bytes=HOT_BYTES) as service:
            mx.clear_cache()
            base_bytes, most_bytes = device.used_bytes(), 0
            texts = dict.fromkeys("abcdefgh", "begin")
            for turn in range(200):
                agent = "abcdefgh"[turn % 8]
                texts[agent] += f" and then {turn} things happened there" * 8
                ask(service, texts[agent], agent=agent, max_tokens=4)
                most_bytes = max(most_bytes, device.used_bytes() - base_bytes)
            held_bytes = service.node.resources.table.hot_bytes
    finally:
        mx.set_cache_limit(pool_before_bytes)

    assert held_bytes <= HOT_BYTES
    assert most_bytes <= HOT_BYTES + POOL_BYTES + STEP_BYTES

"""A machine's memory is divided so that nothing has to be swapped, or the model is refused."""

import pytest

from fabric.errors import FatalError
from fabric.limits import DEVICE_RESERVE_BYTES, GIB, HOT_BYTES_MIN, KIB, MIB, PREFILL_BYTES_MAX
from fabric.memory_plan import MachineMemory, plan_memory

MINI = MachineMemory(16 * GIB, gpu_bytes=11 * GIB, buffers_max=499_000)
STUDIO = MachineMemory(512 * GIB, gpu_bytes=464 * GIB, buffers_max=499_000)
LINUX = MachineMemory(24 * GIB)
WEIGHTS = 4_600 * MIB  # of 8 billion parameters at 4 bits


def parts_of(plan):
    return plan.weights_bytes + plan.hot_bytes + plan.prefill_bytes + plan.pool_bytes


@pytest.mark.parametrize("machine", [MINI, STUDIO, LINUX], ids=["16 GB", "512 GB", "no GPU"])
@pytest.mark.parametrize("nodes_count", [1, 3])
def test_parts_of_the_plan_sum_to_the_node_share(machine, nodes_count):
    machine = MachineMemory(
        machine.ram_bytes, machine.gpu_bytes, machine.buffers_max, nodes_count=nodes_count
    )
    plan = plan_memory(machine, 100 * MIB)

    assert parts_of(plan) + DEVICE_RESERVE_BYTES == plan.share_bytes
    assert nodes_count * plan.share_bytes <= machine.working_set_bytes < machine.ram_bytes


def test_hot_bytes_with_8b_model_on_mini_and_studio():
    mini, studio = plan_memory(MINI, WEIGHTS), plan_memory(STUDIO, WEIGHTS)

    assert 4 * GIB < mini.hot_bytes < 5 * GIB
    assert 450 * GIB < studio.hot_bytes < 460 * GIB
    assert studio.prefill_bytes == PREFILL_BYTES_MAX


PREFIX_BYTES, CACHE_BYTES = 8 * KIB, 36 * KIB  # of a token of 8 billion parameters


def test_prefix_of_131072_tokens_fits_in_prefill_memory_of_mini():
    mini = plan_memory(MINI, WEIGHTS)

    assert mini.with_prefix(PREFIX_BYTES, CACHE_BYTES, 131_072) == mini


@pytest.mark.parametrize("context", [400_000, 10_000_000])
def test_prefix_memory_is_bounded_by_longest_cache_that_fits(context):
    mini = plan_memory(MINI, WEIGHTS)
    plan = mini.with_prefix(8 * PREFIX_BYTES, CACHE_BYTES, context)

    assert parts_of(plan) == parts_of(mini)
    longest = plan.hot_bytes // CACHE_BYTES
    assert plan.prefill_bytes <= 8 * PREFIX_BYTES * (longest + 1)
    assert plan.prefill_bytes > mini.prefill_bytes


def test_prefix_memory_uses_room_left_by_operator_limit_first():
    mini = plan_memory(MINI, WEIGHTS, 2 * GIB)
    plan = mini.with_prefix(4 * PREFIX_BYTES, CACHE_BYTES, 64_000)

    assert plan.hot_bytes == mini.hot_bytes
    assert plan.prefill_bytes == 4 * PREFIX_BYTES * 64_000


def test_machine_without_gpu_offers_part_of_its_ram():
    assert LINUX.working_set_bytes == 18 * GIB


def test_model_that_leaves_no_room_is_rejected_with_figures():
    with pytest.raises(FatalError) as caught:
        plan_memory(MINI, 10 * GIB)

    assert caught.value.code == "exceeds_memory"
    for words in ("16.0 GiB of RAM", "11.0 GiB", "weights take 10.0 GiB", "smaller model"):
        assert words in caught.value.message
    assert "fewer nodes" not in caught.value.message


def test_nodes_that_do_not_fit_one_machine_together_are_rejected():
    three = MachineMemory(16 * GIB, 11 * GIB, 499_000, nodes_count=3)
    plan_memory(MINI, WEIGHTS)

    with pytest.raises(FatalError, match="fewer nodes on this machine"):
        plan_memory(three, WEIGHTS)


def test_largest_weights_fit_and_one_byte_more_is_rejected():
    beside = MINI.share_bytes - plan_memory(MINI, 0).hot_bytes
    weights = MINI.share_bytes - beside - HOT_BYTES_MIN

    assert plan_memory(MINI, weights).hot_bytes == HOT_BYTES_MIN
    with pytest.raises(FatalError):
        plan_memory(MINI, weights + 1)


def test_operator_limit_applies_where_it_fits():
    left_bytes = plan_memory(MINI, WEIGHTS).hot_bytes

    assert plan_memory(MINI, WEIGHTS, GIB).hot_bytes == GIB
    assert plan_memory(MINI, WEIGHTS, 1).hot_bytes == 1
    assert plan_memory(MINI, WEIGHTS, left_bytes).hot_bytes == left_bytes
    with pytest.raises(FatalError, match=r"node\.hot_bytes, 8\.0 GiB"):
        plan_memory(MINI, WEIGHTS, 8 * GIB)


def test_array_cost_keeps_their_count_below_the_gpu_limit():
    plan = plan_memory(STUDIO, WEIGHTS)

    assert plan.hot_bytes / plan.array_bytes_min < 499_000
    assert plan_memory(LINUX, WEIGHTS).array_bytes_min == 0


def test_plan_is_explained_in_figures():
    words = plan_memory(MINI, WEIGHTS).explanation

    assert words.startswith("11.0 GiB for this node: the model's weights 4.5 GiB, prefill")

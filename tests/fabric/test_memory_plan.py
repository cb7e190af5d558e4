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
def test_all_parts_together_are_the_nodes_share(machine, nodes_count):
    machine = MachineMemory(
        machine.ram_bytes, machine.gpu_bytes, machine.buffers_max, nodes_count=nodes_count
    )
    plan = plan_memory(machine, 100 * MIB)

    assert parts_of(plan) + DEVICE_RESERVE_BYTES == plan.share_bytes
    assert nodes_count * plan.share_bytes <= machine.working_set_bytes < machine.ram_bytes


def test_what_an_8b_model_leaves_on_a_mini_and_on_a_studio():
    mini, studio = plan_memory(MINI, WEIGHTS), plan_memory(STUDIO, WEIGHTS)

    assert 4 * GIB < mini.hot_bytes < 5 * GIB
    assert 450 * GIB < studio.hot_bytes < 460 * GIB
    assert studio.prefill_bytes == PREFILL_BYTES_MAX


PREFIX_BYTES, CACHE_BYTES = 8 * KIB, 36 * KIB  # of a token of 8 billion parameters


def test_a_prefix_of_131072_tokens_fits_beside_the_scores_of_a_mini():
    mini = plan_memory(MINI, WEIGHTS)

    assert mini.with_prefix(PREFIX_BYTES, CACHE_BYTES, 131_072) == mini


@pytest.mark.parametrize("context", [400_000, 10_000_000])
def test_no_prefix_takes_more_than_the_longest_cache_that_fits_needs(context):
    mini = plan_memory(MINI, WEIGHTS)
    plan = mini.with_prefix(8 * PREFIX_BYTES, CACHE_BYTES, context)

    assert parts_of(plan) == parts_of(mini)
    longest = plan.hot_bytes // CACHE_BYTES
    assert plan.prefill_bytes <= 8 * PREFIX_BYTES * (longest + 1)
    assert plan.prefill_bytes > mini.prefill_bytes


def test_room_that_the_operator_leaves_is_used_first():
    mini = plan_memory(MINI, WEIGHTS, 2 * GIB)
    plan = mini.with_prefix(4 * PREFIX_BYTES, CACHE_BYTES, 64_000)

    assert plan.hot_bytes == mini.hot_bytes
    assert plan.prefill_bytes == 4 * PREFIX_BYTES * 64_000


def test_a_machine_without_a_gpu_offers_a_part_of_its_ram():
    assert LINUX.working_set_bytes == 18 * GIB


def test_a_model_that_leaves_no_room_for_agents_is_refused_with_figures():
    with pytest.raises(FatalError) as caught:
        plan_memory(MINI, 10 * GIB)

    assert caught.value.code == "exceeds_memory"
    for words in ("16.0 GiB of RAM", "11.0 GiB", "weights take 10.0 GiB", "smaller model"):
        assert words in caught.value.message
    assert "fewer nodes" not in caught.value.message


def test_nodes_that_share_a_machine_are_refused_where_each_alone_would_fit():
    three = MachineMemory(16 * GIB, 11 * GIB, 499_000, nodes_count=3)
    plan_memory(MINI, WEIGHTS)

    with pytest.raises(FatalError, match="fewer nodes on this machine"):
        plan_memory(three, WEIGHTS)


def test_the_least_that_fits_is_a_plan_and_one_byte_less_is_none():
    beside = MINI.share_bytes - plan_memory(MINI, 0).hot_bytes
    weights = MINI.share_bytes - beside - HOT_BYTES_MIN

    assert plan_memory(MINI, weights).hot_bytes == HOT_BYTES_MIN
    with pytest.raises(FatalError):
        plan_memory(MINI, weights + 1)


def test_an_operators_own_limit_counts_where_it_fits():
    left_bytes = plan_memory(MINI, WEIGHTS).hot_bytes

    assert plan_memory(MINI, WEIGHTS, GIB).hot_bytes == GIB
    assert plan_memory(MINI, WEIGHTS, 1).hot_bytes == 1
    assert plan_memory(MINI, WEIGHTS, left_bytes).hot_bytes == left_bytes
    with pytest.raises(FatalError, match=r"node\.hot_bytes, 8\.0 GiB"):
        plan_memory(MINI, WEIGHTS, 8 * GIB)


def test_arrays_count_as_so_much_that_their_number_stays_below_the_gpus_limit():
    plan = plan_memory(STUDIO, WEIGHTS)

    assert plan.hot_bytes / plan.array_bytes_min < 499_000
    assert plan_memory(LINUX, WEIGHTS).array_bytes_min == 0


def test_a_plan_is_explained_in_figures():
    words = plan_memory(MINI, WEIGHTS).explanation

    assert words.startswith("11.0 GiB for this node: the model's weights 4.5 GiB, prefill")

from hypothesis import given
from hypothesis import strategies as st

from node.mlx.backend import CPU_PADDED_TOKENS_MAX
from node.mlx.batch_layers import WASTE_MAX, padded_groups


def test_equal_lengths_form_one_group():
    assert padded_groups([128] * 8) == [list(range(8))]


def test_much_longer_sequence_forms_its_own_group():
    assert padded_groups([100, 60_000, 110]) == [[1], [2, 0]]


@given(st.lists(st.integers(1, 6_000), min_size=1, max_size=32))
def test_groups_partition_sequences_with_bounded_padding(lengths):
    groups = padded_groups(lengths)

    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        held = [lengths[index] for index in group]
        padded = len(held) * max(held)
        assert len(held) == 1 or padded <= min(CPU_PADDED_TOKENS_MAX, WASTE_MAX * sum(held))

"""Window rows that an edited cache needs, and the blocks that store them."""

import random

import pytest

from fabric.kvcache.arrangement import UNEDITED_GRID, Arrangement, WindowGrid

GRID = WindowGrid(300, ((300, 700), (900, 910), (2_000, 10**6)))


STARTS = {0: 0, 255: 0, 299: 256, 300: 300, 555: 300, 556: 556, 699: 556}
STARTS |= {700: 700, 899: 899, 905: 900, 1_999: 1_999, 2_255: 2_000, 2_256: 2_256}


def test_window_blocks_begin_at_their_range_and_every_256_tokens():
    for position, start in STARTS.items():
        assert GRID.block_start(position) == start
        assert UNEDITED_GRID.block_start(position) == position // 256 * 256


def test_only_complete_blocks_of_a_range_are_stored():
    assert list(GRID.blocks(0, 2_600)) == [(300, 556), (556, 700), (900, 910), (2_000, 2_256),
        (2_256, 2_512)]  # fmt: skip
    assert list(GRID.blocks(556, 909)) == [(556, 700)]
    assert list(GRID.blocks(301, 699)) == []
    assert list(UNEDITED_GRID.blocks(256, 800)) == [(256, 512), (512, 768)]


@pytest.mark.parametrize("seed", range(30))
def test_every_row_in_the_window_is_stored_or_already_computed(seed: int):
    """Compute the tokens of the holes one by one; rows ahead follow behind them."""
    rng = random.Random(seed)
    window = rng.choice([2, 8, 40, 300])
    cuts = sorted(rng.sample(range(1, 900), k=2 * rng.randint(1, 4)))
    held = [(0, cuts[0]), *zip(cuts[1:-1:2], cuts[2::2], strict=True), (cuts[-1], cuts[-1] + 50)]
    held = [(start, end) for start, end in held if start < end]
    arrangement = Arrangement.of(held, ())
    needed = WindowGrid(0, ()).needed(arrangement, window)
    assert len(needed) == 1 + len(arrangement.ahead)

    rows = set(range(*needed[0]))
    at, ahead = arrangement.tokens_count, list(zip(arrangement.ahead, needed[1:], strict=True))
    while True:
        assert {*range(max(0, at - window + 1), at)} <= rows
        if not ahead:
            return
        rows.add(at)
        at += 1
        if at == ahead[0][0][0]:
            (_, at), places = ahead.pop(0)
            rows |= {*range(*places)}

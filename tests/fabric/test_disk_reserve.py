"""A store never fills a drive, does not make room for other files, and always takes some agents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.limits import DISK_RESERVE_BYTES_MAX, DISK_RESERVE_BYTES_MIN, GIB
from fabric.retention import disk_capacity_bytes, disk_reserve_bytes

SIZES = st.integers(0, 16_000 * GIB)


@pytest.mark.parametrize(
    ("drive", "usable", "reserve"),
    [
        (256, 200, 25.6),  # a tenth
        (64, 60, 10),  # at least
        (8_000, 7_000, 64),  # at most
        (256, 30, 15),  # nearly full: half of what is left
        (256, 0, 0),
    ],
)
def test_reserve_follows_drive_size_and_usable_space(drive, usable, reserve):
    assert disk_reserve_bytes(drive * GIB, usable * GIB) == int(reserve * GIB)


@given(drive=SIZES, free=SIZES, stored=SIZES)
def test_capacity_covers_stored_bytes_and_keeps_the_reserve(drive, free, stored):
    capacity = disk_capacity_bytes(drive, free, stored)
    grown = capacity - stored
    reserve = disk_reserve_bytes(drive, free + stored)

    assert grown >= 0
    assert grown == 0 or free - grown >= reserve
    assert 0 <= reserve <= DISK_RESERVE_BYTES_MAX
    assert reserve >= min(DISK_RESERVE_BYTES_MIN, (free + stored) // 2)


@given(drive=SIZES, free=st.integers(2 * GIB, 16_000 * GIB))
def test_empty_store_always_has_capacity(drive, free):
    assert disk_capacity_bytes(drive, free, 0) >= GIB

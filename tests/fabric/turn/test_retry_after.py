import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.limits import RETRY_AFTER_S_MAX
from node.engine.run_queue import RETRY_AFTER_S_MIN, retry_after_s

COUNTS = st.integers(0, 10_000)


@pytest.mark.parametrize(
    ("waiting", "running", "turns_per_s", "expected"),
    [
        (256, 8, 0.0, RETRY_AFTER_S_MIN),  # no measurement yet
        (40, 4, 0.5, 10.0),  # 20 turns of 2 s, four at a time
        (16, 0, 1.0, 8.0),
        (2, 32, 10.0, RETRY_AFTER_S_MIN),
        (256, 1, 0.01, RETRY_AFTER_S_MAX),
    ],
)
def test_retry_after_is_time_to_serve_half_the_queue(waiting, running, turns_per_s, expected):
    assert retry_after_s(waiting, running, turns_per_s) == expected


@given(COUNTS, COUNTS, st.floats(0, allow_nan=False))
def test_retry_after_stays_within_limits(waiting, running, turns_per_s):
    found = retry_after_s(waiting, running, turns_per_s)
    assert RETRY_AFTER_S_MIN <= found <= RETRY_AFTER_S_MAX

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.prefill_chunks import prefill_chunk_tokens
from node.limits import (
    PREFILL_CHUNK_BUSY_S,
    PREFILL_CHUNK_S,
    PREFILL_CHUNK_TOKENS_BUSY_MIN,
    PREFILL_CHUNK_TOKENS_MAX,
    PREFILL_CHUNK_TOKENS_MIN,
)

LONG = 1 << 20
LARGEST = PREFILL_CHUNK_TOKENS_MAX


@pytest.mark.parametrize(
    ("position", "tokens_per_s", "busy", "want"),
    [
        (0, 1e9, False, 4_096),
        (4_096, 1e9, False, 2_048),
        (16_384, 1e9, False, 1_024),
        (65_536, 1e9, False, 512),
        (0, 0.0, False, 512),
        (0, 0.0, True, 512),
        (0, 100.0, True, 128),
        (0, 100.0, False, 512),
        (0, 1_000.0, False, 512),
        (0, 1_100.0, False, 1_024),
        (0, 4_096.0, True, 1_024),
        (0, 5_000.0, True, 1_024),
        (20_000, 1e9, True, 1_024),
        (0, 1e9, True, 4_096),
    ],
)
def test_chunk_size_follows_position_speed_and_load(position, tokens_per_s, busy, want):
    got = prefill_chunk_tokens(
        position, LONG, largest=LARGEST, busy=busy, exact=False, tokens_per_s=tokens_per_s
    )

    assert got == want


@pytest.mark.parametrize(
    ("position", "pairs_max", "want"),
    [
        (0, 4_096 * 4_096, 4_096),
        (0, 4_096 * 4_096 - 1, 2_048),
        (32_768, 1_024 * (32_768 + 1_024), 1_024),
        (32_768, 256 * (32_768 + 256), 256),
        (100_000, 1, PREFILL_CHUNK_TOKENS_BUSY_MIN),
    ],
)
def test_chunk_size_is_bounded_by_score_memory(position, pairs_max, want):
    options = {"largest": LARGEST, "busy": False, "exact": False, "tokens_per_s": 1e9}
    got = prefill_chunk_tokens(position, LONG, pairs_max=pairs_max, **options)

    assert got == want


def ends_of(length, start, **options):
    position, ends = start, []
    while position < length:
        position += prefill_chunk_tokens(position, length - position, **options)
        ends.append(position)
    return ends


STOPS = st.lists(st.integers(0, 9_000), max_size=6).map(lambda found: tuple(sorted(set(found))))


@given(
    length=st.integers(1, 9_000),
    start=st.integers(0, 8_999),
    largest=st.sampled_from([512, LARGEST]),
    busy=st.booleans(),
    exact=st.booleans(),
    tokens_per_s=st.floats(0, 1e6),
    stops=STOPS,
)
def test_chunks_cover_the_prompt_and_end_at_every_stop(
    length, start, largest, busy, exact, tokens_per_s, stops
):
    options = {"largest": largest, "busy": busy, "exact": exact, "tokens_per_s": tokens_per_s}
    start = min(start, length - 1)
    ends = ends_of(length, start, stops=stops, **options)
    sizes = [b - a for a, b in zip([start, *ends], ends, strict=False)]

    assert ends[-1] == length
    assert {stop for stop in stops if start < stop <= length} <= set(ends)
    assert all(0 < size <= largest for size in sizes)
    limit_s = PREFILL_CHUNK_BUSY_S if busy else PREFILL_CHUNK_S
    least = PREFILL_CHUNK_TOKENS_BUSY_MIN if busy else PREFILL_CHUNK_TOKENS_MIN
    if not exact and tokens_per_s:
        assert all(size <= max(least, tokens_per_s * limit_s) for size in sizes)
    if exact:
        grid = {end for end in ends if end % 256 == 0}
        assert grid == {at for at in range(256, length + 1, 256) if at > start}


@given(st.integers(0, 4), st.integers(1, 3_000), st.booleans(), st.floats(0, 1e6))
def test_exact_chunks_depend_on_the_grid_only(cut, length, busy, tokens_per_s):
    start = min(cut * 256, length - 1) // 256 * 256
    calm = {"largest": 4_096, "busy": False, "exact": True}
    other = {"largest": 512, "busy": busy, "exact": True, "tokens_per_s": tokens_per_s}
    cold = ends_of(length, 0, **calm)

    assert ends_of(length, start, **other) == [end for end in cold if end > start]

"""An estimate follows measurements, decays slowly, and backs off after failures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.limits import KIB, MIB, PROBE_BYTES_MAX
from fabric.net import link_estimate as le

GIGABIT = 125e6
FRESH = le.LinkEstimate(GIGABIT, is_nominal_reported=True)

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("with_transfer"), st.integers(0, 1 << 36), st.floats(0, 1e4)),
        st.tuples(st.just("with_round_trip"), st.floats(0, 100), st.just(0.0)),
        st.tuples(st.just("with_failure"), st.just(0), st.just(0.0)),
        st.tuples(st.just("with_checks_due"), st.just(0), st.just(0.0)),
        st.tuples(st.just("with_ping_sent"), st.just(0), st.just(0.0)),
        st.tuples(st.just("wait"), st.floats(0, 1e4), st.just(0.0)),
    ),
    max_size=30,
)


def play(link, events, now_s=0.0):
    for name, first, second in events:
        if name == "wait":
            now_s += first
        elif name == "with_transfer":
            link = le.with_transfer(link, first, second, now_s)
        elif name == "with_round_trip":
            link = le.with_round_trip(link, first, now_s)
        elif name == "with_checks_due":
            link = le.with_checks_due(link)
        else:
            link = getattr(le, name)(link, now_s)
    return link, now_s


@given(EVENTS, st.booleans())
def test_link_rate_stays_bounded_and_pings_continue_after_any_events(events, is_nominal):
    link, now_s = play(le.LinkEstimate(GIGABIT, is_nominal_reported=is_nominal), events)

    assert 0 < link.expected_bytes_per_s < math.inf
    if is_nominal:
        assert link.expected_bytes_per_s <= le.NOMINAL_SHARE_MAX * GIGABIT * (1 + 1e-9)
    assert le.PROBE_BYTES_MIN <= le.probe_bytes(link) <= PROBE_BYTES_MAX
    assert le.ping_due(link, now_s + max(le.PING_EVERY_S, le.REST_MAX_S))
    assert (link.is_reachable is False) == (link.failures > 0)


@given(st.floats(1e5, 1e8), st.floats(0.001, 10))
def test_rate_estimate_converges_to_steady_transfer_rate(rate, seconds):
    link, now_s = FRESH, 0.0
    for _ in range(60):
        link = le.with_transfer(link, max(le.SAMPLE_BYTES_MIN, int(rate * seconds)), seconds, now_s)
        now_s += 1.0
    sample = max(le.SAMPLE_BYTES_MIN, int(rate * seconds)) / seconds

    assert link.bytes_per_s == pytest.approx(min(sample, 1.25 * GIGABIT), rel=0.01)


def test_sample_weight_grows_with_transfer_duration():
    link = le.with_transfer(FRESH, 100 * MIB, 1.0, 0.0)
    odd = le.with_transfer(link, MIB, 0.1, 1.0)
    long = le.with_transfer(link, 20 * MIB, 2.0, 1.0)

    assert odd.bytes_per_s == pytest.approx(0.8 * 100 * MIB + 0.2 * 10 * MIB)
    assert long.bytes_per_s == pytest.approx(10 * MIB, rel=0.3)


def test_stale_rate_is_replaced_and_small_transfers_are_ignored():
    link = le.with_transfer(FRESH, 100 * MIB, 1.0, 0.0)

    assert le.with_transfer(link, 1000, 0.5, 1.0).bytes_per_s == link.bytes_per_s
    assert le.with_transfer(FRESH, 1000, 0.5, 1.0).is_reachable
    late = le.with_transfer(link, 10 * MIB, 1.0, le.RATE_FRESH_S)
    assert late.bytes_per_s == pytest.approx(10 * MIB)


def test_failed_link_backs_off_exponentially_and_recovers_at_once():
    link, now_s, rests = FRESH, 0.0, []
    for _ in range(8):
        link = le.with_failure(le.with_ping_sent(link, now_s), now_s)
        rests.append(le.rest_s(link))
        assert not le.ping_due(link, now_s + rests[-1] - 0.1)
        now_s += rests[-1]
        assert le.ping_due(link, now_s)

    assert rests == [2, 4, 8, 16, 32, 60, 60, 60]
    assert le.with_round_trip(link, 0.001, now_s).is_reachable


def test_streams_that_break_together_count_as_one_failure():
    link = le.with_failure(le.with_failure(le.with_failure(FRESH, 5.0), 5.1), 5.9)

    assert link.failures == 1


def test_refused_probes_are_retried_with_growing_delays():
    link, now_s, rests_s = le.with_round_trip(le.LinkEstimate(1e9), 0.001, 0.0), 0.0, []
    for _ in range(8):
        link = le.with_unfinished_probe(le.with_probe_sent(link, now_s))
        probed_s = now_s
        while not le.probe_due(link, now_s):
            now_s += 1.0
        rests_s.append(now_s - probed_s)
    measured = le.with_transfer(link, MIB, 0.01, now_s)

    assert rests_s[0] == le.PROBE_REST_MIN_S
    assert rests_s == sorted(rests_s)
    assert rests_s[-1] == le.PROBE_REST_MAX_S
    assert measured.unfinished_probes == 0
    assert not le.probe_due(measured, now_s + le.RATE_FRESH_S - 1)


def test_cut_probe_is_a_measurement_that_is_soon_repeated():
    link = le.with_probe_sent(le.with_round_trip(le.LinkEstimate(1e9), 0.001, 0.0), 0.0)
    slow = le.with_probe(link, 64 * KIB, 3.0, 3.0)

    assert slow.bytes_per_s == 64 * KIB / 3.0
    assert not le.probe_due(slow, le.PROBE_REST_MIN_S - 1)
    assert le.probe_due(slow, le.PROBE_REST_MIN_S)
    again = le.with_probe(le.with_probe_sent(slow, 5.0), MIB, 0.01, 5.0)
    assert again.bytes_per_s > slow.bytes_per_s
    assert not le.probe_due(again, 5.0 + le.RATE_FRESH_S - 1)


def test_traffic_replaces_pings_and_probes_but_doubt_forces_a_ping():
    link = le.with_round_trip(le.with_ping_sent(FRESH, 0.0), 0.001, 0.0)
    assert le.probe_due(link, 1.0)
    busy = le.with_transfer(link, 100 * MIB, 1.0, 20.0)

    assert not le.ping_due(busy, 20.0 + le.PING_EVERY_S - 1)
    assert not le.probe_due(busy, 20.0 + le.RATE_FRESH_S - 1)
    assert le.probe_due(busy, 20.0 + le.RATE_FRESH_S)
    assert le.ping_due(le.with_checks_due(busy), 20.0)
    assert not le.probe_due(le.with_failure(link, 1.0), 1e6)


@given(st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1000.0)), max_size=50))
def test_probes_use_one_percent_of_time_plus_a_credit(steps):
    budget, now_s, spent_s, longest_s = le.ProbeBudget(), 0.0, 0.0, 0.0
    for seconds, pause_s in steps:
        budget = budget.at(now_s)
        if budget.allows:
            budget = budget.spend(seconds)
            spent_s, longest_s = spent_s + seconds, max(longest_s, seconds)
        now_s += seconds + pause_s

    assert spent_s <= le.PROBE_CREDIT_S + 0.01 * now_s + longest_s + 1e-6
    assert budget.at(now_s + 500.0).allows


@pytest.mark.parametrize(
    ("steady_s", "elapsed_s", "away"),
    [
        (1.0, 1.0, False),
        (1.4, 1.4, False),
        (1.0, 3600.0, True),  # the steady clock slept, too
        (40.0, 40.0, True),  # a stopped process
    ],
)
def test_sleep_is_detected_from_both_clocks(steady_s, elapsed_s, away):
    assert le.was_away(steady_s, elapsed_s, 1.0) is away

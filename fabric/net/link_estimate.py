"""Estimate of one link from its observations: speed, delay, and the time of the next try.

Pure functions: each takes an estimate, an event and its time, and returns the next estimate. Times
are monotonic seconds of the node that measures.
"""

from dataclasses import dataclass, replace
from typing import Final

from fabric.limits import KIB, PROBE_BYTES_MAX

OLD_WEIGHT: Final = 0.8  # of the old estimate, against a new sample of SAMPLE_S or less
SAMPLE_S: Final = 0.1  # a longer one counts for several
SAMPLES_MAX: Final = 16
NOMINAL_SHARE_MAX: Final = 1.25  # a sample above this share of nominal is a measuring error
UNMEASURED_SHARE: Final = 0.7  # of nominal that good transfers reach; Mooncake: 0.71
SAMPLE_BYTES_MIN: Final = 256 * KIB  # fewer measure the delay, not the rate
RATE_FLOOR: Final = 1.0  # bytes/s; keeps divisions by a rate safe
RATE_CEILING: Final = 1e12  # bytes/s; faster than memory, so a measuring error
RESTING_BYTES_PER_S: Final = 1.0  # rank of a failed link, below all working ones

PING_EVERY_S: Final = 30.0
RATE_FRESH_S: Final = 600.0
REST_MIN_S: Final = 2.0  # after the first failure; doubles with each
SAME_FAILURE_S: Final = 1.0  # streams that break together count as one failure
REST_MAX_S: Final = 60.0  # so a plugged-in cable is found within a minute

PROBE_SHARE: Final = 0.01  # of the time, for all links of a node together
PROBE_CREDIT_S: Final = 1.0
PROBE_TARGET_S: Final = 0.05
PROBE_BYTES_MIN: Final = 256 * KIB
PROBE_REST_MIN_S: Final = 5.0  # after an unfinished probe; doubles with each
PROBE_REST_MAX_S: Final = 120.0

QUIET_S: Final = 5.0  # without a transfer, before a probe may disturb one

SLEEP_JUMP_S: Final = 5.0
STALL_S: Final = 15.0


def planned_bytes_per_s(measured: float | None, nominal: float) -> float:
    """Return the rate to plan with: the measured one, or a share of the nominal one."""
    return max(RATE_FLOOR, UNMEASURED_SHARE * nominal) if measured is None else measured


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Measurements of one link by the node at its near end."""

    nominal_bytes_per_s: float
    is_nominal_reported: bool = False  # by the system; else assumed from the link's kind
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    answered_s: float | None = None  # time of the last answer
    measured_s: float | None = None  # when the rate was last measured
    failures: int = 0  # in a row
    failed_s: float = 0.0  # when it last failed
    pinged_s: float | None = None  # time of the last ping; None: one is due now
    probed_s: float | None = None  # time of the last probe of its rate
    unfinished_probes: int = 0  # refused or cut, in a row

    @property
    def expected_bytes_per_s(self) -> float:
        """Return the rate to plan with, whether the link works or not."""
        return planned_bytes_per_s(self.bytes_per_s, self.nominal_bytes_per_s)

    @property
    def is_reachable(self) -> bool | None:
        """Return whether the last try succeeded, or None before the first."""
        if self.failures:
            return False
        return None if self.answered_s is None else True


def with_round_trip(link: LinkEstimate, rtt_s: float, now_s: float) -> LinkEstimate:
    """Return the estimate after a round trip; the delay is averaged like the rate."""
    old_s = link.rtt_s
    mean_s = rtt_s if old_s is None else OLD_WEIGHT * old_s + (1 - OLD_WEIGHT) * rtt_s
    return replace(link, rtt_s=mean_s, answered_s=now_s, failures=0)


def with_transfer(
    link: LinkEstimate, moved_bytes: int, seconds: float, now_s: float
) -> LinkEstimate:
    """Return the estimate after a transfer; too few bytes only prove that the link works.

    The rate has no lower bound relative to nominal: a fast port on a slow switch really is that
    slow.
    """
    link = replace(link, answered_s=now_s, failures=0)
    if moved_bytes < SAMPLE_BYTES_MIN or seconds <= 0:
        return link
    sample = min(RATE_CEILING, max(RATE_FLOOR, moved_bytes / seconds))
    if link.is_nominal_reported:
        sample = min(sample, NOMINAL_SHARE_MAX * link.nominal_bytes_per_s)
    old = link.bytes_per_s
    if old is not None and link.measured_s is not None and now_s - link.measured_s < RATE_FRESH_S:
        old_weight = OLD_WEIGHT ** min(SAMPLES_MAX, max(1.0, seconds / SAMPLE_S))
        sample = old_weight * old + (1 - old_weight) * sample
    return replace(link, bytes_per_s=sample, measured_s=now_s, unfinished_probes=0)


def with_failure(link: LinkEstimate, now_s: float) -> LinkEstimate:
    """Return the estimate after a failure: the link rests, longer each time."""
    if link.failures and now_s - link.failed_s < SAME_FAILURE_S:
        return link
    return replace(link, failures=link.failures + 1, failed_s=now_s)


def rest_s(link: LinkEstimate) -> float:
    """Return how long to wait before a failed link is tried again."""
    return min(REST_MAX_S, REST_MIN_S * 2.0 ** min(link.failures - 1, 10))


def with_nominal_rate(link: LinkEstimate, nominal: float, *, is_reported: bool) -> LinkEstimate:
    """Return the estimate for a port's new nominal rate, without measurements at the old one."""
    return replace(
        link,
        nominal_bytes_per_s=float(nominal),
        is_nominal_reported=is_reported,
        bytes_per_s=None,
        measured_s=None,
    )


def with_checks_due(link: LinkEstimate) -> LinkEstimate:
    """Return the estimate with a ping due now, and a probe soon: the machine has changed."""
    return replace(link, pinged_s=None, probed_s=None, unfinished_probes=0)


def with_ping_sent(link: LinkEstimate, now_s: float) -> LinkEstimate:
    """Return the estimate after a ping was sent."""
    return replace(link, pinged_s=now_s)


def with_probe_sent(link: LinkEstimate, now_s: float) -> LinkEstimate:
    """Return the estimate after a probe was sent."""
    return replace(link, probed_s=now_s)


def with_probe(link: LinkEstimate, moved_bytes: int, seconds: float, now_s: float) -> LinkEstimate:
    """Return the estimate after a probe that moved bytes: a cut one shows how slow the link is."""
    if moved_bytes >= SAMPLE_BYTES_MIN:
        return with_transfer(link, moved_bytes, seconds, now_s)
    slow = replace(link, bytes_per_s=max(RATE_FLOOR, moved_bytes / seconds), measured_s=now_s)
    return with_unfinished_probe(slow)


def with_unfinished_probe(link: LinkEstimate) -> LinkEstimate:
    """Return the estimate after the peer was too busy for a probe, or the link too slow."""
    return replace(link, unfinished_probes=link.unfinished_probes + 1)


def ping_due(link: LinkEstimate, now_s: float) -> bool:
    """Return whether to ping the link; recent traffic makes a ping unnecessary."""
    if link.pinged_s is None:
        return True
    if link.failures:
        return now_s - max(link.failed_s, link.pinged_s) >= rest_s(link)
    answered_s = link.pinged_s if link.answered_s is None else max(link.answered_s, link.pinged_s)
    return now_s - answered_s >= PING_EVERY_S


def probe_due(link: LinkEstimate, now_s: float) -> bool:
    """Return whether the link works, but has no recent measurement of its rate."""
    if not link.is_reachable:
        return False
    is_fresh = link.measured_s is not None and now_s - link.measured_s < RATE_FRESH_S
    if is_fresh and not link.unfinished_probes:
        return False
    return link.probed_s is None or now_s - link.probed_s >= _probe_rest_s(link)


def _probe_rest_s(link: LinkEstimate) -> float:
    if not link.unfinished_probes:
        return RATE_FRESH_S
    return min(PROBE_REST_MAX_S, PROBE_REST_MIN_S * 2.0 ** min(link.unfinished_probes - 1, 10))


def probe_bytes(link: LinkEstimate) -> int:
    """Return the size of a probe: enough to measure, yet brief if the nominal rate is wrong."""
    target_bytes = int(link.expected_bytes_per_s * PROBE_TARGET_S)
    return max(PROBE_BYTES_MIN, min(PROBE_BYTES_MAX, target_bytes))


@dataclass(frozen=True, slots=True)
class ProbeBudget:
    """Seconds that probes may take: PROBE_SHARE of the time, saved up to PROBE_CREDIT_S.

    The credit lets a node measure all links at once when it starts.
    """

    credit_s: float = PROBE_CREDIT_S
    at_s: float | None = None

    def at(self, now_s: float) -> "ProbeBudget":
        """Return the budget at this time."""
        saved_s = 0.0 if self.at_s is None else PROBE_SHARE * max(0.0, now_s - self.at_s)
        return ProbeBudget(min(PROBE_CREDIT_S, self.credit_s + saved_s), now_s)

    def spend(self, seconds: float) -> "ProbeBudget":
        """Return the budget after a probe; it may be negative."""
        return ProbeBudget(self.credit_s - seconds, self.at_s)

    @property
    def allows(self) -> bool:
        """Return whether a probe may begin."""
        return self.credit_s > 0


def was_away(steady_s: float, elapsed_s: float, expected_s: float) -> bool:
    """Return whether the machine slept or the process was stopped during a wait.

    The steady clock stops while the machine sleeps, and the elapsed one does not; after a stop of
    the process both are late. The wall clock is useless here: people and time servers set it.
    """
    return elapsed_s - steady_s > SLEEP_JUMP_S or steady_s - expected_s > STALL_S

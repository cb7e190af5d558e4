"""Estimate of one link from its observations: speed, delay, and the time of the next try.

Pure functions from an estimate, an event and the time to the next estimate. Times are the
owner's monotonic seconds.
"""

from dataclasses import dataclass, replace
from typing import Final

from fabric.limits import KIB, PROBE_BYTES_MAX

OLD_WEIGHT: Final = 0.8  # of the estimate when a sample of SAMPLE_S or less comes in
SAMPLE_S: Final = 0.1  # a longer one counts for several
SAMPLES_MAX: Final = 16
NOMINAL_SHARE_MAX: Final = 1.25  # above it the sample, not the link, is at fault
UNMEASURED_SHARE: Final = 0.7  # of nominal that well-made transfers reach; Mooncake: 0.71
SAMPLE_BYTES_MIN: Final = 256 * KIB  # fewer measure the delay, not the rate
RATE_FLOOR: Final = 1.0  # bytes/s; a link is never worth nothing
RATE_CEILING: Final = 1e12  # nor more than memory carries
RESTING_BYTES_PER_S: Final = 1.0  # of a failed link, while others work

PING_EVERY_S: Final = 30.0
RATE_FRESH_S: Final = 600.0
REST_MIN_S: Final = 2.0  # after the first failure; doubles with each
SAME_FAILURE_S: Final = 1.0  # several streams break at once: that is one failure
REST_MAX_S: Final = 60.0  # a plugged-in cable is found within a minute

PROBE_SHARE: Final = 0.01  # of the time, for all links of a node together
PROBE_CREDIT_S: Final = 1.0
PROBE_TARGET_S: Final = 0.05
PROBE_BYTES_MIN: Final = 256 * KIB
PROBE_REST_MIN_S: Final = 5.0  # after a refusal: the peer was sending; doubles with each
PROBE_REST_MAX_S: Final = 120.0

QUIET_S: Final = 5.0  # without a transfer, before a probe may disturb one

SLEEP_JUMP_S: Final = 5.0
STALL_S: Final = 15.0


def planned_bytes_per_s(measured: float | None, nominal: float) -> float:
    """Return the rate to plan with: the measured one, or a share of the nominal one."""
    return max(RATE_FLOOR, UNMEASURED_SHARE * nominal) if measured is None else measured


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """One link as its owner sees it."""

    nominal_bytes_per_s: float
    nominal_is_told: bool = False  # by the system; else it was assumed from the kind
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    heard_s: float | None = None  # time of the last answer
    rated_s: float | None = None  # when the rate was last measured
    failures: int = 0  # in a row
    failed_s: float = 0.0  # when it last failed
    asked_s: float | None = None  # when it was last pinged; None asks for it now
    probed_s: float | None = None  # when its rate was last asked for
    probe_refusals: int = 0  # in a row

    @property
    def expected_bytes_per_s(self) -> float:
        """Return the rate to plan with, whether the link works or not."""
        return planned_bytes_per_s(self.bytes_per_s, self.nominal_bytes_per_s)

    @property
    def is_reachable(self) -> bool | None:
        """Return whether the last try succeeded, or None before the first."""
        if self.failures:
            return False
        return None if self.heard_s is None else True


def answered(link: LinkEstimate, rtt_s: float, now_s: float) -> LinkEstimate:
    """Note a round trip; the delay is averaged like the rate."""
    old_s = link.rtt_s
    mean_s = rtt_s if old_s is None else OLD_WEIGHT * old_s + (1 - OLD_WEIGHT) * rtt_s
    return replace(link, rtt_s=mean_s, heard_s=now_s, failures=0)


def moved(link: LinkEstimate, moved_bytes: int, seconds: float, now_s: float) -> LinkEstimate:
    """Note `moved_bytes` in `seconds`; few bytes say only that the link works.

    No lower clamp: a fast port behind a slow switch really is slower than a tenth of itself.
    """
    link = replace(link, heard_s=now_s, failures=0)
    if moved_bytes < SAMPLE_BYTES_MIN or seconds <= 0:
        return link
    sample = min(RATE_CEILING, max(RATE_FLOOR, moved_bytes / seconds))
    if link.nominal_is_told:
        sample = min(sample, NOMINAL_SHARE_MAX * link.nominal_bytes_per_s)
    old = link.bytes_per_s
    if old is not None and link.rated_s is not None and now_s - link.rated_s < RATE_FRESH_S:
        old_weight = OLD_WEIGHT ** min(SAMPLES_MAX, max(1.0, seconds / SAMPLE_S))
        sample = old_weight * old + (1 - old_weight) * sample
    return replace(link, bytes_per_s=sample, rated_s=now_s, probe_refusals=0)


def failed(link: LinkEstimate, now_s: float) -> LinkEstimate:
    """Record a failure: the link rests, longer each time."""
    if link.failures and now_s - link.failed_s < SAME_FAILURE_S:
        return link
    return replace(link, failures=link.failures + 1, failed_s=now_s)


def rest_s(link: LinkEstimate) -> float:
    """Return how long a link that failed is left alone."""
    return min(REST_MAX_S, REST_MIN_S * 2.0 ** min(link.failures - 1, 10))


def renegotiated(link: LinkEstimate, nominal: float, *, is_told: bool) -> LinkEstimate:
    """Set a port's new nominal speed, and discard measurements at the old one."""
    return replace(
        link,
        nominal_bytes_per_s=float(nominal),
        nominal_is_told=is_told,
        bytes_per_s=None,
        rated_s=None,
    )


def doubted(link: LinkEstimate) -> LinkEstimate:
    """Ask for a new ping and, in time, a new rate, as something about the machine changed."""
    return replace(link, asked_s=None, probed_s=None, probe_refusals=0)


def asked(link: LinkEstimate, now_s: float) -> LinkEstimate:
    """Note that a ping is on its way."""
    return replace(link, asked_s=now_s)


def probed(link: LinkEstimate, now_s: float) -> LinkEstimate:
    """Note that a probe is on its way."""
    return replace(link, probed_s=now_s)


def probe_refused(link: LinkEstimate) -> LinkEstimate:
    """Record that the peer was too busy for a probe, which is no failure of the link."""
    return replace(link, probe_refusals=link.probe_refusals + 1)


def ping_due(link: LinkEstimate, now_s: float) -> bool:
    """Return whether to ping the link; recent traffic makes a ping unnecessary."""
    if link.asked_s is None:
        return True
    if link.failures:
        return now_s - max(link.failed_s, link.asked_s) >= rest_s(link)
    heard_s = link.asked_s if link.heard_s is None else max(link.heard_s, link.asked_s)
    return now_s - heard_s >= PING_EVERY_S


def probe_due(link: LinkEstimate, now_s: float) -> bool:
    """Return whether the link works, but has no recent measurement of its rate."""
    if not link.is_reachable:
        return False
    if link.rated_s is not None and now_s - link.rated_s < RATE_FRESH_S:
        return False
    return link.probed_s is None or now_s - link.probed_s >= _probe_rest_s(link)


def _probe_rest_s(link: LinkEstimate) -> float:
    if not link.probe_refusals:
        return RATE_FRESH_S
    return min(PROBE_REST_MAX_S, PROBE_REST_MIN_S * 2.0 ** min(link.probe_refusals - 1, 10))


def probe_bytes(link: LinkEstimate) -> int:
    """Return the bytes of a probe: enough to measure, and brief even if nominal is wrong."""
    wanted = int(link.expected_bytes_per_s * PROBE_TARGET_S)
    return max(PROBE_BYTES_MIN, min(PROBE_BYTES_MAX, wanted))


@dataclass(frozen=True, slots=True)
class ProbeBudget:
    """Seconds that probes may take: a hundredth of the time, saved up to a small credit.

    The credit lets a node that has just met its peers measure all links at once.
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
    """Return whether the machine slept, by the advance of its clocks during a wait.

    The steady clock stands still in sleep, and the one of elapsed time does not; a stopped process
    sees both go too far. Neither is the wall clock, which people and time servers set.
    """
    return elapsed_s - steady_s > SLEEP_JUMP_S or steady_s - expected_s > STALL_S

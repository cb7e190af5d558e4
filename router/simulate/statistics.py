"""Figures of several seeds: means, and 95 % intervals paired by seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

# Student's t for 95 %, two-sided, by degrees of freedom; beyond, the normal distribution's.
_T: Final = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL: Final = 1.960


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean with the ends of its 95 % interval; of one value, all three are equal."""

    mean: float
    low: float
    high: float

    def as_json(self) -> list[float]:
        return [round(each, 6) for each in (self.mean, self.low, self.high)]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of independent values with its 95 % interval."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean, mean, mean)
    half = _quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def ratio(values: Sequence[float], references: Sequence[float]) -> Interval:
    """Return the geometric mean of values over their references, pair by pair, with its interval.

    Values of one seed have the same arrivals, so what they share cancels out.
    """
    logs = [
        math.log(max(value, 1e-9) / max(reference, 1e-9))
        for value, reference in zip(values, references, strict=True)
    ]
    of_logs = interval(logs)
    return Interval(*(math.exp(each) for each in (of_logs.mean, of_logs.low, of_logs.high)))


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean of positive values."""
    return math.exp(fmean(math.log(max(value, 1e-9)) for value in values))


def _quantile(degrees: int) -> float:
    return _T[degrees - 1] if degrees <= len(_T) else _NORMAL

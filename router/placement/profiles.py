"""Speeds of nodes as measured by this router's own turns. Pure.

    prefill   tokens per second by position in the context, from reports of progress
    decode    tokens per second of one sequence alone, by the number of turns beside it

A node computes one chunk at a time, so the time since its last report of progress is that of one
chunk, regardless of other waiting turns. A node's reported speed counts as the first `PRIOR_S` of
each measure; later turns weigh more than earlier ones. Nothing is measured of a node that reports
no speed: others without one are assumed to equal it.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fabric.control.node_calls import NodeView
from fabric.ids import NodeName

POSITIONS: Final = (4_096, 16_384, 65_536)  # ends of buckets; the last one is open
BATCHES: Final = (1, 2, 4, 8)  # ends of buckets; the last one is open
PRIOR_S: Final = 1.0  # weight of a node's own report, as seconds of computing
MEMORY_S: Final = 60.0  # seconds of computing after which a measurement counts a third
CHUNK_TOKENS_MIN: Final = 64  # smaller ones measure the launch
ANSWER_TOKENS_MIN: Final = 16
DECODE_WEIGHT: Final = 0.1  # of an answer's seconds: they overlap with others'
SPREAD: Final = 4.0  # times what a node reports of itself, or less, that can be its speed
NEWS_SHARE: Final = 0.02  # by which a speed must change before snapshots are rebuilt


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """Speeds of one node; None where no turn has shown one."""

    prefill: tuple[float | None, ...] = (None,) * (len(POSITIONS) + 1)
    decode: tuple[float | None, ...] = (None,) * (len(BATCHES) + 1)
    # The same with the nearest known speed in place of each unknown one.
    _near_prefill: tuple[float | None, ...] = field(init=False, repr=False, compare=False)
    _near_decode: tuple[float | None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Find the nearest known speeds once, since each decision reads them."""
        object.__setattr__(self, "_near_prefill", _filled(self.prefill))
        object.__setattr__(self, "_near_decode", _filled(self.decode))

    def prefill_tokens_per_s(self, reported: float, position: float = 0.0) -> float:
        """Return the speed at a position: the nearest known one, or what the node reported."""
        return self._near_prefill[bisect_left(POSITIONS, position)] or reported

    def decode_tokens_per_s(self, reported: float, batch: int = 1) -> float:
        """Return the speed of one sequence alone, as it follows from answers in such a batch."""
        return self._near_decode[bisect_left(BATCHES, batch)] or reported


def _filled(speeds: tuple[float | None, ...]) -> tuple[float | None, ...]:
    return tuple(_nearest(speeds, bucket) for bucket in range(len(speeds)))


def _nearest(speeds: tuple[float | None, ...], bucket: int) -> float | None:
    """Return the known speed of the nearest bucket, the lower one of two."""
    for distance in range(len(speeds)):
        for at in (bucket - distance, bucket + distance):
            if 0 <= at < len(speeds) and (speed := speeds[at]) is not None:
                return speed
    return None


UNKNOWN: Final = NodeProfile()


@dataclass(slots=True)
class _Measure:
    """Tokens and seconds of one bucket, the older the lighter."""

    tokens: float
    seconds: float

    @property
    def per_s(self) -> float:
        return self.tokens / self.seconds

    def add(self, tokens: float, seconds: float, expected_per_s: float) -> None:
        """Add a measure; what is far from expected is not a speed, but a pause or a burst."""
        tokens = min(
            max(tokens, seconds * expected_per_s / SPREAD), seconds * expected_per_s * SPREAD
        )
        kept = math.exp(-seconds / MEMORY_S)
        self.tokens = self.tokens * kept + tokens
        self.seconds = self.seconds * kept + seconds


@dataclass(slots=True)
class _NodeMeasures:
    incarnation: int
    prefill: dict[int, _Measure] = field(default_factory=dict)
    decode: dict[int, _Measure] = field(default_factory=dict)
    progress_s: float = -math.inf  # of the last report of progress, of any turn
    busy_s: float = 0.0  # with prompts, since the start
    profile: NodeProfile = UNKNOWN


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Tokens of a prompt that a node had in place at a time."""

    tokens: int
    at_s: float
    busy_s: float = 0.0  # of the node with prompts, until then


class Profiles:
    """Profiles by node; those of a node that started again are forgotten."""

    def __init__(self, view_of: Callable[[NodeName], NodeView | None]) -> None:
        self._view_of = view_of
        self._nodes: dict[NodeName, _NodeMeasures] = {}
        self.changed: set[NodeName] = set()  # for the keeper of snapshots

    def of(self, name: NodeName) -> NodeProfile:
        """Return the profile of a node."""
        measures = self._nodes.get(name)
        return measures.profile if measures is not None else UNKNOWN

    def note_progress(
        self, node: NodeName, before: PromptProgress | None, tokens: int, now_s: float
    ) -> PromptProgress:
        """Record that a node has computed or loaded `tokens` tokens of a prompt, since `before`."""
        measures, view = self._measures(node), self._view_of(node)
        if measures is None or view is None:
            return PromptProgress(tokens, now_s)
        if before is not None:
            seconds = now_s - max(before.at_s, measures.progress_s)
            computed = tokens - before.tokens
            measures.busy_s += max(0.0, seconds)
            if computed >= CHUNK_TOKENS_MIN and seconds > 0 and view.prefill_tokens_per_s > 0:
                bucket = bisect_left(POSITIONS, tokens)
                speed = measures.profile.prefill_tokens_per_s(view.prefill_tokens_per_s, tokens)
                measure = measures.prefill.setdefault(bucket, _prior(speed))
                measure.add(computed, seconds, view.prefill_tokens_per_s)
                if _is_news(measures.profile.prefill[bucket], measure.per_s):
                    self._publish(node, measures)
        measures.progress_s = now_s
        return PromptProgress(tokens, now_s, measures.busy_s)

    def note_answer(
        self, node: NodeName, first: PromptProgress, tokens: int, now_s: float, batch: int
    ) -> None:
        """Record the end of an answer of `tokens` tokens, decoded beside `batch - 1` others.

        Seconds that the node spent on prompts during the answer do not count.
        """
        measures, view = self._measures(node), self._view_of(node)
        if measures is None or view is None or view.decode_tokens_per_s <= 0:
            return
        seconds = now_s - first.at_s - (measures.busy_s - first.busy_s)
        if tokens < ANSWER_TOKENS_MIN or seconds <= 0:
            return
        bucket, slowdown = bisect_left(BATCHES, batch), math.sqrt(max(1, batch))
        speed = measures.profile.decode_tokens_per_s(view.decode_tokens_per_s, batch)
        measure = measures.decode.setdefault(bucket, _prior(speed))
        weighed = DECODE_WEIGHT * tokens * slowdown, DECODE_WEIGHT * seconds
        measure.add(*weighed, view.decode_tokens_per_s)
        if _is_news(measures.profile.decode[bucket], measure.per_s):
            self._publish(node, measures)

    def _measures(self, node: NodeName) -> _NodeMeasures | None:
        view = self._view_of(node)
        if view is None:
            return None
        measures = self._nodes.get(node)
        if measures is None or measures.incarnation != view.incarnation:
            measures = self._nodes[node] = _NodeMeasures(view.incarnation)
        return measures

    def _publish(self, node: NodeName, measures: _NodeMeasures) -> None:
        """Make a new profile of a node's measures."""
        measures.profile = NodeProfile(
            _speeds(measures.prefill, len(POSITIONS) + 1),
            _speeds(measures.decode, len(BATCHES) + 1),
        )
        self.changed.add(node)


def _prior(speed: float) -> _Measure:
    return _Measure(speed * PRIOR_S, PRIOR_S)


def _speeds(measures: dict[int, _Measure], count: int) -> tuple[float | None, ...]:
    return tuple(measures[at].per_s if at in measures else None for at in range(count))


def _is_news(before: float | None, now: float) -> bool:
    return before is None or abs(now - before) > NEWS_SHARE * before

"""Workloads: seeded sessions, the time between their starts, and the work that they bring."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from router.simulate.fleet_file import FleetModel
from router.simulate.sessions import Arrival, Script, ScriptedSession

SAMPLES: Final = 64  # sessions whose work is measured
BATCH_ASSUMED: Final = 4  # answers at once on a busy node, for an estimate of its capacity


@dataclass(frozen=True, slots=True)
class Scale:
    """Facts of a fleet that the size of some workloads follows."""

    nodes: int
    hot_tokens: int  # that all memories hold together

    @classmethod
    def of(cls, fleet: FleetModel) -> "Scale":
        return cls(fleet.count, fleet.hot_tokens)


@dataclass(frozen=True, slots=True)
class SessionSeed:
    """All that the scripts of one session follow from."""

    random: Random
    number: int
    scale: Scale


ScriptMaker = Callable[[SessionSeed], Iterable[Script]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Kind of sessions; `scripts` makes those of the session with a number."""

    name: str
    title: str
    scripts: ScriptMaker
    sessions: int  # by default

    def scripts_of(self, seed: int, number: int, scale: Scale) -> Iterable[Script]:
        """Return the scripts of one session; equal arguments give equal scripts."""
        random = Random(f"{self.name}:{seed}:{number}")
        return self.scripts(SessionSeed(random, number, scale))

    def arrivals(self, seed: int, scale: Scale, sessions: int, per_s: float) -> Iterator[Arrival]:
        """Yield sessions in order of their starts."""
        random, at_s = Random(f"{self.name}:{seed}"), 0.0
        for number in range(sessions):
            at_s += random.expovariate(per_s)
            name = f"{self.name}-{number}"
            scripts = self.scripts_of(seed, number, scale)
            # Answers differ between sessions and seeds, as their texts would.
            yield Arrival(at_s, ScriptedSession(name, (seed << 32) + number, scripts))


@dataclass(frozen=True, slots=True)
class Work:
    """Mean work of a session whose own cache is always found."""

    turns: float
    prompt_tokens: float  # to be computed
    answer_tokens: float


def work_of(workload: Workload, scale: Scale, sessions: int) -> Work:
    """Measure a workload's mean session; what sessions before it have computed is not counted."""
    count = min(SAMPLES, sessions)
    turns = prompt = answer = 0
    known: set[int] = set()
    for number in range(count):
        of_session: set[int] = set()
        for script in workload.scripts_of(0, number, scale):
            for ask in script:
                turns += 1
                prompt += sum(tokens for name, tokens in ask.parts if name not in known)
                answer += ask.answer_tokens
                of_session.update(name for name, _ in ask.parts)
        known |= of_session
    return Work(turns / count, prompt / count, answer / count)


def capacity_per_s(fleet: FleetModel, work: Work) -> float:
    """Estimate the sessions per second that a fleet serves with all nodes always busy.

    Computed at the speed of short contexts and in batches of BATCH_ASSUMED, so a load of 0.9 of it
    is a heavy one.
    """
    total = 0.0
    for node in fleet.nodes:
        batch_speed = node.decode_tokens_per_s * BATCH_ASSUMED ** (1 - node.batch_exponent)
        busy_s = work.prompt_tokens / node.prefill_tokens_per_s + work.answer_tokens / batch_speed
        total += node.count / busy_s
    return total


def lognormal(random: Random, mean: float, median: float, most: float) -> int:
    """Draw a whole number with this mean and median, at most `most` and at least 1."""
    sigma = math.sqrt(2 * math.log(mean / median))
    return max(1, round(min(most, random.lognormvariate(math.log(median), sigma))))

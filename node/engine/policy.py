"""Scheduling policy: pure functions of the waiting and running sequences and free memory.

Admission:  interactive before background, then the tenant with the fewest running by its weight,
            then the one whose last turn began longest ago, then by arrival; a sequence that does
            not fit in memory may be overtaken a few times; background yields its slot and memory
            to interactive, and a tenant with more than its part beside another yields a slot to it.
Prefill:    interactive before background; prompts with little left before long ones; tenants
            take turns by weight, and so do the long prompts of each.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from node.limits import (
    ADMISSION_PASSES_MAX,
    BACKGROUND_PATIENCE_S,
    PREFILL_WARM_STREAK_MAX,
    PREFILL_WARM_TOKENS,
)


class Schedulable(Protocol):
    """Sequence, with the attributes that scheduling depends on."""

    @property
    def tenant(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def order(self) -> int: ...
    @property
    def is_resumed(self) -> bool: ...
    @property
    def is_urgent(self) -> bool: ...
    @property
    def needs_bytes(self) -> int: ...
    @property
    def reserve_bytes(self) -> int: ...
    @property
    def passed_count(self) -> int: ...
    @property
    def prefill_left(self) -> int: ...
    @property
    def served_s(self) -> float: ...
    @property
    def served_order(self) -> int: ...


S = TypeVar("S", bound=Schedulable)
NONE_RUNNING: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity left for one more sequence."""

    slots: int  # more that may run
    paused: int  # more that may be paused
    memory_bytes: int  # negative if existing caches exceed the budget


@dataclass(frozen=True, slots=True)
class Start(Generic[S]):
    """Decision to run a sequence, new or paused, ahead of `passed`, which do not fit in memory."""

    sequence: S
    passed: tuple[S, ...] = ()


@dataclass(frozen=True, slots=True)
class Preempt(Generic[S]):
    """Decision to take a running sequence's slot."""

    sequence: S


def next_move(
    waiting: Iterable[S],
    paused: Iterable[S],
    running: Iterable[S],
    room: Capacity,
    started: Mapping[str, int] = NONE_RUNNING,
) -> Start[S] | Preempt[S] | None:
    """Return the next change of the running set, or None if there is none.

    `started` has the sequence number of each tenant's last start.
    """
    held, active = list(paused), list(running)
    victims = _victims(active) if room.paused > 0 else []
    slots = Counter(sequence.tenant for sequence in active)
    # Among equals, paused sequences go first, since they hold memory, and so do answers that began
    # on another node, since their clients have read a part.
    first = {id(sequence) for sequence in held}
    queue = sorted(
        [*held, *waiting],
        key=lambda s: (
            not s.is_urgent,
            slots[s.tenant] / s.weight,
            not (id(s) in first or s.is_resumed),
            started.get(s.tenant, 0),
            s.order,
        ),
    )
    passed: list[S] = []
    for sequence in queue:
        if sequence.needs_bytes <= max(0, room.memory_bytes):
            if room.slots > 0:
                return Start(sequence, tuple(passed) if sequence.needs_bytes else ())
            # Without a slot, no sequence after it gets one either.
            if room.paused <= 0:
                return None
            if sequence.is_urgent and victims:
                return Preempt(victims[0])
            greedy = _greediest(active, slots, sequence)
            return Preempt(greedy) if greedy is not None else None
        if sequence.passed_count >= ADMISSION_PASSES_MAX:
            room = replace(room, memory_bytes=0)
        passed.append(sequence)
    return None


def _victims(sequences: Iterable[S]) -> list[S]:
    """List the sequences that may be paused, the newest first."""
    return sorted((s for s in sequences if not s.is_urgent), key=lambda s: -s.order)


def _greediest(active: Iterable[S], slots: Counter[str], other: Schedulable) -> S | None:
    """Choose a sequence to pause for `other`, of a tenant that has at least two slots more."""
    fewer = (slots[other.tenant] + 1) / other.weight
    over = [s for s in active if slots[s.tenant] / s.weight > fewer]
    over = [s for s in over if s.tenant != other.tenant and s.is_urgent <= other.is_urgent]
    return max(over, key=lambda s: (slots[s.tenant] / s.weight, s.order), default=None)


def is_warm(sequence: Schedulable) -> bool:
    """Return whether few enough tokens are left to prefill to go before long prompts."""
    return sequence.prefill_left <= PREFILL_WARM_TOKENS


def next_prompt(
    ready: Iterable[S], warm_streak: int, served: Mapping[str, float] = NONE_RUNNING
) -> S | None:
    """Choose the prompt of the next chunk, after `warm_streak` chunks in a row of warm prompts.

    `served` has the virtual time of each tenant's next chunk; the lowest one goes first.
    """
    all_ready = list(ready)
    first = [sequence for sequence in all_ready if sequence.is_urgent] or all_ready
    if not first:
        return None
    long = [sequence for sequence in first if not is_warm(sequence)]
    if len(long) < len(first) and not (long and warm_streak >= PREFILL_WARM_STREAK_MAX):
        warm = [sequence for sequence in first if is_warm(sequence)]
        return min(warm, key=lambda s: (served.get(s.tenant, 0), s.prefill_left, s.order))
    return min(long, key=lambda s: (served.get(s.tenant, 0), s.served_order, s.order))


def next_starved(unserved: Iterable[S], now_s: float) -> S | None:
    """Choose the background sequence that has waited long enough to count as interactive."""
    starved = [s for s in unserved if now_s - s.served_s >= BACKGROUND_PATIENCE_S]
    return min(starved, key=lambda sequence: (sequence.served_s, sequence.order), default=None)

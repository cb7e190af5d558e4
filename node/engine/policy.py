"""Scheduling policy: pure functions of the waiting and running sequences and free memory.

Admission:  interactive before background, then the tenant with the fewest running by its weight,
            then the one whose last turn began longest ago, then by arrival; a sequence that does
            not fit in memory may be overtaken a few times; background yields its slot and memory
            to interactive, and a tenant with more than its part beside another yields a slot to it.
Prefill:    interactive before background; prompts with little left before long ones; tenants
            take turns by weight, and so do the long prompts of each.
Promoted:   a background sequence that waited too long runs beside the others, in a slot of its
            own, with memory that no interactive one lacks, and its chunks go first.
Delay:      no background chunk where it would delay an interactive prompt for a second time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Generic, Protocol, TypeVar

from node.limits import (
    ADMISSION_PASSES_MAX,
    BACKGROUND_WAIT_S_MAX,
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
    def is_promoted(self) -> bool: ...
    @property
    def is_delayed(self) -> bool: ...
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
    preempted, active = list(paused), list(running)
    victims = _victims(active) if room.paused > 0 else []
    slots = Counter(sequence.tenant for sequence in active)
    # Among equals, paused sequences go first, since they hold memory, and so do answers that began
    # on another node, since their clients have read a part.
    first = {id(sequence) for sequence in preempted}
    queue = sorted(
        [*preempted, *waiting],
        key=lambda s: (
            not s.is_urgent,
            not s.is_promoted,
            slots[s.tenant] / s.weight,
            not (id(s) in first or s.is_resumed),
            started.get(s.tenant, 0),
            s.order,
        ),
    )
    passed: list[S] = []
    is_full = False  # if one sequence gets no slot, none after it does
    for sequence in queue:
        if sequence.needs_bytes > max(0, room.memory_bytes):
            if sequence.passed_count >= ADMISSION_PASSES_MAX:
                room = replace(room, memory_bytes=0)
            passed.append(sequence)
        elif sequence.needs_bytes and not sequence.is_urgent and any(s.is_urgent for s in passed):
            continue  # an interactive sequence would take that memory back
        elif sequence.is_promoted or (room.slots > 0 and not is_full):
            return Start(sequence, tuple(passed) if sequence.needs_bytes else ())
        elif not is_full:
            is_full = True
            giving = next(iter(victims), None) if sequence.is_urgent else None
            if room.paused > 0 and giving is None:
                giving = _greediest(active, slots, sequence)
            if giving is not None:
                return Preempt(giving)
    return None


def _victims(sequences: Iterable[S]) -> list[S]:
    """List the sequences that may be paused for their slots, the newest first."""
    candidates = (s for s in sequences if not (s.is_urgent or s.is_promoted))
    return sorted(candidates, key=lambda s: -s.order)


def _greediest(active: Iterable[S], slots: Counter[str], other: Schedulable) -> S | None:
    """Choose a sequence to pause for `other`, of a tenant that has at least two slots more."""
    fewer = (slots[other.tenant] + 1) / other.weight
    over = [s for s in active if slots[s.tenant] / s.weight > fewer and not s.is_promoted]
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
    promoted = next((s for s in all_ready if s.is_promoted and not s.is_urgent), None)
    if promoted is not None:
        return promoted
    first = [sequence for sequence in all_ready if sequence.is_urgent] or all_ready
    if not first:
        return None
    long = [sequence for sequence in first if not is_warm(sequence)]
    if len(long) < len(first) and not (long and warm_streak >= PREFILL_WARM_STREAK_MAX):
        warm = [sequence for sequence in first if is_warm(sequence)]
        return min(warm, key=lambda s: (served.get(s.tenant, 0), s.prefill_left, s.order))
    return min(long, key=lambda s: (served.get(s.tenant, 0), s.served_order, s.order))


def without_second_delay(ready: Iterable[S], undecoded: Iterable[Schedulable]) -> list[S]:
    """List the prompts whose chunk delays no interactive prompt for a second time."""
    is_any_delayed = any(other.is_urgent and other.is_delayed for other in undecoded)
    return [sequence for sequence in ready if sequence.is_urgent or not is_any_delayed]


def next_starved(unserved: Iterable[S], now_s: float) -> S | None:
    """Choose the background sequence that has waited long enough to be promoted."""
    starved = [s for s in unserved if now_s - s.served_s >= BACKGROUND_WAIT_S_MAX]
    return min(starved, key=lambda sequence: (sequence.served_s, sequence.order), default=None)

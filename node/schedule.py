"""What to run next, as pure functions of who waits, who runs and what is free.

Admission:  interactive before background, then by arrival; one that does not fit in memory
            may be overtaken a few times; background gives its place to interactive.
Prefill:    interactive before background; prompts with little left before long ones, which
            take turns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from fabric.limits import (
    ADMISSION_PASSES_MAX,
    BACKGROUND_PATIENCE_S,
    PREFILL_WARM_STREAK_MAX,
    PREFILL_WARM_TOKENS,
)


class Schedulable(Protocol):
    """What a decision may look at; see Sequence."""

    @property
    def order(self) -> int: ...
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


@dataclass(frozen=True, slots=True)
class Room:
    """What one more sequence could have."""

    seats: int  # more that may run
    paused: int  # more that may be paused
    memory_bytes: int  # negative where caches that exist exceed the budget
    can_spill: bool = False  # pausing can free memory


@dataclass(frozen=True, slots=True)
class Start(Generic[S]):
    """Let it run, new or paused; `passed` were ahead of it and do not fit in memory."""

    sequence: S
    passed: tuple[S, ...] = ()


@dataclass(frozen=True, slots=True)
class Pause(Generic[S]):
    """Take it out of the running ones; with `spills`, out of memory as well."""

    sequence: S
    spills: bool = False


def next_move(
    waiting: Iterable[S], paused: Iterable[S], running: Iterable[S], room: Room
) -> Start[S] | Pause[S] | None:
    """Return the next change among those that run, or None where all is as it should be."""
    held, victims = list(paused), _victims(running)[: max(0, room.paused)]
    if room.seats <= 0 and not victims:
        return None
    # Among equals a paused one goes first: it holds memory that only its end sets free.
    rank = {id(sequence): -1 for sequence in held}
    queue = sorted([*held, *waiting], key=lambda s: (not s.is_urgent, rank.get(id(s), 0), s.order))
    passed: list[S] = []
    for sequence in queue:
        may_pause = sequence.is_urgent and bool(victims)
        if sequence.needs_bytes <= max(0, room.memory_bytes):
            if room.seats > 0:
                return Start(sequence, tuple(passed) if sequence.needs_bytes else ())
            # Without a seat nobody behind it gets one either.
            return Pause(victims[0]) if may_pause else None
        if sequence.is_urgent and room.can_spill:
            holders = [s for s in [*_victims(held), *victims] if s.reserve_bytes > s.needs_bytes]
            freed_bytes = sum(holder.reserve_bytes for holder in holders)
            if holders and sequence.needs_bytes <= room.memory_bytes + freed_bytes:
                return Pause(holders[0], spills=True)
        if sequence.passed_count >= ADMISSION_PASSES_MAX:
            room = replace(room, memory_bytes=0, can_spill=False)
        passed.append(sequence)
    return None


def _victims(sequences: Iterable[S]) -> list[S]:
    """List who may be paused, those first that came last."""
    return sorted((s for s in sequences if not s.is_urgent), key=lambda s: -s.order)


def is_warm(sequence: Schedulable) -> bool:
    """Say whether so little is left to prefill that it goes before long prompts."""
    return sequence.prefill_left <= PREFILL_WARM_TOKENS


def next_prompt(ready: Iterable[S], warm_streak: int) -> S | None:
    """Choose whose chunk is computed next; `warm_streak` chunks in a row were of warm prompts."""
    all_ready = list(ready)
    first = [sequence for sequence in all_ready if sequence.is_urgent] or all_ready
    if not first:
        return None
    long = [sequence for sequence in first if not is_warm(sequence)]
    if len(long) < len(first) and not (long and warm_streak >= PREFILL_WARM_STREAK_MAX):
        return min(first, key=lambda sequence: (sequence.prefill_left, sequence.order))
    return min(long, key=lambda sequence: (sequence.served_order, sequence.order))


def next_promotion(unserved: Iterable[S], now_s: float) -> S | None:
    """Choose the background sequence that has waited long enough to count as interactive."""
    tired = [s for s in unserved if now_s - s.served_s >= BACKGROUND_PATIENCE_S]
    return min(tired, key=lambda sequence: (sequence.served_s, sequence.order), default=None)

"""The engine's queue of sequences, and how much of it one tenant may fill."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from fabric.limits import RETRY_AFTER_S_MIN, retry_wait_s
from fabric.turn.generation import Priority
from node.engine.sequence import Sequence
from node.limits import BACKGROUND_WAITING_SHARE, TENANT_WAITING_FACTOR


@dataclass(slots=True)
class RunQueue:
    """Waiting, prefilling, decoding and paused sequences; a sequence is in exactly one list.

    Changed by the engine thread only.
    """

    waiting: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.waiting, *self.prefilling, *self.decoding, *self.paused])

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a slot."""
        return [*self.prefilling, *self.decoding]

    @property
    def undecoded(self) -> list[Sequence]:
        """Sequences that are not decoding."""
        return [*self.waiting, *self.prefilling, *self.paused]

    def run(self, sequence: Sequence) -> None:
        """Give a waiting or paused sequence a slot, where it left off."""
        self.remove(sequence)
        (self.prefilling if sequence.slot is None else self.decoding).append(sequence)

    def pause(self, sequence: Sequence) -> None:
        """Take a running sequence's slot."""
        self.remove(sequence)
        self.paused.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.prefilling, self.decoding, self.paused):
            if sequence in queue:
                queue.remove(sequence)
                return


class Waiting(Protocol):
    """A queued sequence, as far as admission looks at it."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> Priority: ...


def refusal(queued: Iterable[Waiting], tenant: str, priority: Priority, places: int) -> str | None:
    """Return why one more request of `tenant` may not wait, or None if it may.

    A tenant may hold a fixed multiple of the free places: alone it gets most of them, and the next
    tenant still finds a few. That needs no list of tenants and no fixed shares.
    """
    queued = list(queued)
    if len(queued) >= places:
        return f"{len(queued)} requests are waiting on this node"
    if priority is Priority.BACKGROUND:  # the rest is kept for interactive ones
        queued = [waiting for waiting in queued if waiting.priority is priority]
        places = max(1, int(places * BACKGROUND_WAITING_SHARE))
        if len(queued) >= places:
            return f"{len(queued)} background requests are waiting on this node"
    own_count = sum(waiting.tenant == tenant for waiting in queued)
    if own_count >= TENANT_WAITING_FACTOR * (places - len(queued)):
        return f"{own_count} of your requests are waiting on this node"
    return None


def retry_after_s(waiting_count: int, running_count: int, turns_per_s: float) -> float:
    """Return the seconds until half of a queue has been served.

    `turns_per_s` is the speed of one slot, 0 if unmeasured. Waiting for the whole queue would be
    too late; waiting for its first slot would bring all clients back at once.
    """
    if turns_per_s <= 0:
        return RETRY_AFTER_S_MIN
    wait_s = waiting_count / 2 / (turns_per_s * max(1, running_count))
    return retry_wait_s(wait_s)

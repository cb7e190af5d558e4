"""Where every sequence of the engine is: waiting, prefilling, decoding or paused."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from node.engine.sequence import Sequence


@dataclass(slots=True)
class RunQueue:
    """Four lists; a sequence is in exactly one. Changed by the engine thread only."""

    waiting: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self.waiting, *self.prefilling, *self.decoding, *self.paused])

    @property
    def running(self) -> list[Sequence]:
        """List those that hold a slot."""
        return [*self.prefilling, *self.decoding]

    @property
    def undecoded(self) -> list[Sequence]:
        """List those that do not decode now."""
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

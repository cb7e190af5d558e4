"""Times of one turn: its name, its time at the router, and its seconds on nodes by part."""

from dataclasses import dataclass, field, fields
from typing import Final

from fabric.codec import left_out
from fabric.ids import Traceparent, TurnId


@dataclass(frozen=True, slots=True)
class TurnTag:
    """Name of a turn, and its time at the router before it was sent to its node."""

    id: TurnId
    began_s: float  # wall clock, when the router received the request
    queue_s: float = 0.0  # waited at the router
    move_s: float = 0.0  # its agent was moved to the node first
    # Its span at the router; only for nodes that read it.
    trace: Traceparent | None = field(default=None, metadata=left_out())


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds of a turn by part. No moment counts twice, so their sum is the turn's duration."""

    queue_s: float = 0.0  # waited for a place, for its agent or for memory
    move_s: float = 0.0  # its agent was moved to the node first
    prepare_s: float = 0.0  # rendered, encoded and matched its prompt
    fetch_s: float = 0.0  # waited for tokens of another node
    load_s: float = 0.0  # read tokens from the disk
    prefill_s: float = 0.0  # computed the rest of the prompt, and the first token
    decode_s: float = 0.0  # computed the other tokens
    save_s: float = 0.0  # saved what was not saved meanwhile
    first_token_s: float | None = None  # from the request to the first token; None: there was none

    @property
    def total_s(self) -> float:
        """Duration of the turn."""
        parts = (self.queue_s, self.move_s, self.prepare_s, self.fetch_s)
        return sum(parts) + self.load_s + self.prefill_s + self.decode_s + self.save_s

    def plus(self, later: "TurnTimes") -> "TurnTimes":
        """Add the times of the turn's next part, on another node."""
        parts = (
            (part.name, getattr(self, part.name), getattr(later, part.name)) for part in _PARTS
        )
        first_s = self.first_token_s
        if first_s is None and later.first_token_s is not None:
            first_s = self.total_s + later.first_token_s
        return TurnTimes(
            **{name: own_s + next_s for name, own_s, next_s in parts}, first_token_s=first_s
        )

    def __str__(self) -> str:
        """List the parts that took time."""
        parts = ((part.name.removesuffix("_s"), getattr(self, part.name)) for part in _PARTS)
        return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts if seconds)


_PARTS: Final = fields(TurnTimes)[:-1]

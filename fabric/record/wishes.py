"""What was said of an agent as a whole, beside its pin: a part of its record."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wishes:
    """Wishes that hold until the agent's next turn, or longer where they say so."""

    rebuilds: bool = False  # its next turn computes anew what was kept behind edits

    def after_turn(self) -> "Wishes | None":
        """Return what is left of it once a turn was taken."""
        return None

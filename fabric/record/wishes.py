"""What was said of an agent as a whole, beside its pin: a part of its record."""

from dataclasses import dataclass, replace

from fabric.limits import DECAY_S_MAX


@dataclass(frozen=True, slots=True)
class Wishes:
    """All of them hold until the agent's next turn, but for whose memory it is."""

    rebuilds: bool = False  # its next turn computes anew what was kept behind edits
    is_closed: bool = False  # it is done: nothing of it is worth keeping while others need room
    decays_after_s: float | None = None  # idle for so long, it is worth less than any other
    is_private: bool = False  # no other agent of its tenant begins with its memory

    def problem(self) -> str | None:
        """Say why they cannot be meant; None if they can."""
        after_s = self.decays_after_s
        if after_s is not None and not 0 <= after_s <= DECAY_S_MAX:
            return "it decays after no time"
        return None

    def after_turn(self) -> "Wishes | None":
        """Return what is left of them once a turn was taken."""
        return stated(Wishes(is_private=self.is_private))

    def of_fork(self) -> "Wishes | None":
        """Return those of a new agent with the same memory: what it is worth begins anew."""
        return stated(replace(self, is_closed=False, decays_after_s=None))

    def is_spent(self, idle_s: float) -> bool:
        """Say whether an agent that has been idle for so long goes before others."""
        return self.is_closed or (self.decays_after_s is not None and idle_s >= self.decays_after_s)


def is_spent(wishes: Wishes | None, idle_s: float) -> bool:
    """Say so of an agent of whom nothing may have been said."""
    return wishes is not None and wishes.is_spent(idle_s)


def stated(wishes: Wishes) -> Wishes | None:
    """Return them, or None where they say nothing."""
    return None if wishes == Wishes() else wishes

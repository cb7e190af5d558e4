"""Fair shares of a bounded resource: a new owner always finds some, however much others hold."""

from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class FairShare(Generic[Owner]):
    """Bounded resource of which each owner may hold up to half of what the others leave.

    One alone has half, two have a third each, n have 1/(n+1), so none fills it. This is how
    switches share packet memory (Choudhury and Hahne, "Dynamic queue length thresholds", 1998).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Owner, int] = {}
        self._total = 0

    def take(self, owner: Owner, amount: int = 1) -> bool:
        """Take some if the owner's share allows it; return whether it does."""
        held = self._held.get(owner, 0)
        left = self._limit - (self._total - held)
        if amount > 0 and held + amount > -(-left // 2):
            return False
        self._held[owner] = held + amount
        self._total += amount
        return True

    def give(self, owner: Owner, amount: int = 1) -> None:
        """Hold less."""
        left = self._held.get(owner, 0) - amount
        assert left >= 0, "gave more than was taken"
        self._total -= amount
        if left:
            self._held[owner] = left
        else:
            self._held.pop(owner, None)

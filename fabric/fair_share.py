"""Fair shares of a bounded resource: some is always left for a new owner."""

from typing import Generic, TypeVar

Owner = TypeVar("Owner")


def share_of(left: int) -> int:
    """Return how much one owner may hold of what the others do not hold."""
    return -(-left // 2)


class FairShare(Generic[Owner]):
    """Bounded resource; each owner may hold at most half of what the others do not hold.

    One owner gets at most half, two a third each, n owners 1/(n+1) each, so some is always free.
    Switches share packet memory in this way (Choudhury and Hahne, "Dynamic queue length
    thresholds", 1998).
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: dict[Owner, int] = {}
        self._total = 0

    def take(self, owner: Owner, amount: int = 1) -> bool:
        """Take `amount` if the owner's share allows it; return whether it did."""
        if not self.has_room(owner, amount):
            return False
        self._held[owner] = self._held.get(owner, 0) + amount
        self._total += amount
        return True

    def has_room(self, owner: Owner, amount: int = 1) -> bool:
        """Return whether the owner's share allows `amount` more."""
        held = self._held.get(owner, 0)
        available = self._limit - (self._total - held)
        return amount <= 0 or held + amount <= share_of(available)

    def give(self, owner: Owner, amount: int = 1) -> None:
        """Give back `amount` that the owner has taken."""
        remaining = self._held.get(owner, 0) - amount
        assert remaining >= 0, "gave more than was taken"
        self._total -= amount
        if remaining:
            self._held[owner] = remaining
        else:
            self._held.pop(owner, None)

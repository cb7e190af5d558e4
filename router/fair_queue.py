"""Weighted fair queue of waiting turns: start-time fair queueing over tenants (Goyal et al., 1996).

    start(tenant)   max(virtual time, finish of its last item)
    next            the first item of the tenant with the lowest start, which becomes virtual time
    finish          start + cost / weight

While two tenants wait, the costs that leave the queue, divided by weights, differ by no more than
one item of each. An idle tenant gains no credit.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


def _any_tenant(_tenant: str) -> bool:
    return True


class FairQueue(Generic[T]):
    """Items of tenants in the order of weighted fairness; of one tenant, in order of arrival."""

    def __init__(self, weight: Callable[[str], float] = lambda _: 1.0) -> None:
        self._weight = weight
        self._waiting: dict[str, dict[T, float]] = {}  # tenant: its items and their costs, in order
        self._finish: dict[str, float] = {}  # of tenants that are ahead of virtual time
        self._virtual = 0.0
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, tenant: str, item: T, cost: float) -> None:
        """Add an item, which is not in the queue yet."""
        assert cost >= 0, "a cost is a time"
        self._waiting.setdefault(tenant, {})[item] = cost
        self._count += 1

    def remove(self, tenant: str, item: T) -> None:
        """Remove an item that no longer waits; its tenant pays nothing for it."""
        self._take(tenant, item)
        self._forget()

    def next(self, may_go: Callable[[str], bool] = _any_tenant) -> T | None:
        """Remove and return the next item of the tenants that may go, or None."""
        able = [tenant for tenant in self._waiting if may_go(tenant)]
        if not able:
            return None
        tenant = min(able, key=self._start)
        item = next(iter(self._waiting[tenant]))
        self._virtual = self._start(tenant)
        cost = self._take(tenant, item)
        self._finish[tenant] = self._virtual + cost / self._weight(tenant)
        self._forget()
        return item

    def items(self, tenant: str) -> list[T]:
        """List a tenant's items, in their order."""
        return list(self._waiting.get(tenant, ()))

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's items."""
        return len(self._waiting.get(tenant, ()))

    def __contains__(self, item: object) -> bool:
        return any(item in items for items in self._waiting.values())

    def cost(self, tenant: str) -> float:
        """Return the cost of all that a tenant has in the queue."""
        return sum(self._waiting.get(tenant, {}).values())

    def tenants(self) -> list[str]:
        """List the tenants that have something in the queue."""
        return list(self._waiting)

    def _start(self, tenant: str) -> float:
        return max(self._virtual, self._finish.get(tenant, 0.0))

    def _take(self, tenant: str, item: T) -> float:
        items = self._waiting[tenant]
        cost = items.pop(item)
        self._count -= 1
        if not items:  # it is placed after the others when it comes back
            del self._waiting[tenant]
        return cost

    def _forget(self) -> None:
        """Reset an empty queue; else forget tenants without credit or debt."""
        if not self._count:
            self._finish.clear()
            self._virtual = 0.0
            return
        ahead = {t: f for t, f in self._finish.items() if t in self._waiting or f > self._virtual}
        self._finish = ahead

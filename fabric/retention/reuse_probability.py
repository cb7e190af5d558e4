"""Probability that an agent with n turns takes another, counted per tenant.

Side requests of one turn and agents of a hundred look alike when they begin. Whether the
former ever come back depends on their clients, so it is learned, not assumed.
"""

from fabric.ids import TenantId
from fabric.limits import REUSE_COUNTS_MAX, REUSE_TENANTS_MAX

TURNS_TOLD_APART = 31  # in five classes: 1, 2-3, 4-7, 8-15, and more
_PRIOR_AGENTS = 4  # as if so many had been seen before
_PRIOR_RETURNS = 2  # and so many of them again


class ReuseProbability:
    """Counts turns and returns; what was counted long ago counts less and less."""

    def __init__(self) -> None:
        self._counts: dict[tuple[TenantId, int], tuple[int, int]] = {}  # turns, returns

    def note(self, tenant: TenantId, turns_count: int) -> None:
        """Count an agent's turn number `turns_count`: it returned after the one before."""
        if turns_count > 1:
            self._add(tenant, turns_count - 1, 0, 1)
        self._add(tenant, turns_count, 1, 0)

    def note_all(self, tenant: TenantId, turns_count: int) -> None:
        """Count all turns so far of an agent met for the first time."""
        for count in range(1, min(turns_count, TURNS_TOLD_APART) + 1):
            self.note(tenant, count)

    def probability(self, tenant: TenantId, turns_count: int) -> float:
        """Estimate the probability of another turn, above 0 and below 1."""
        turns, returns = self._counts.get((tenant, _class(turns_count)), (0, 0))
        return (min(returns, turns) + _PRIOR_RETURNS) / (turns + _PRIOR_AGENTS)

    def _add(self, tenant: TenantId, turns_count: int, turns: int, returns: int) -> None:
        key = (tenant, _class(turns_count))
        if key not in self._counts and len(self._counts) >= REUSE_TENANTS_MAX:
            self._counts.pop(next(iter(self._counts)))
        known = self._counts.get(key, (0, 0))
        if known[0] >= REUSE_COUNTS_MAX:
            known = (known[0] // 2, known[1] // 2)
        self._counts[key] = (known[0] + turns, known[1] + returns)


def _class(turns_count: int) -> int:
    return min(max(turns_count, 1), TURNS_TOLD_APART).bit_length()

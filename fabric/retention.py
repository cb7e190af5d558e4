"""Retention: victims of a full tier, the chance that an agent returns, and reserved disk space.

    rank    reuse probability × seconds a turn would save ÷ bytes kept ÷ idle time
    floor   what a tenant keeps whatever the others do; without a setting, an equal part
    quota   what a tenant never exceeds
    pin     goes last, as long as a tenant's pins fit their part of its floor
    branch  goes first, pinned or not: its agent has superseded it
    replica goes next: another node has the same
    spent   goes next, pinned or not: its client closed it or let it decay

Bytes that several agents refer to count once, and are free only when the last one goes.
Active agents are never victims. The policy is independent of memory, disks and clocks.

Probability that an agent with n turns takes another, counted per tenant.

Side requests of one turn and agents of a hundred look alike when they begin. Whether the
former ever come back depends on their clients, so it is learned, not assumed.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fabric.ids import AgentKey, TenantId
from fabric.limits import (
    DISK_RESERVE_BYTES_MAX,
    DISK_RESERVE_BYTES_MIN,
    DISK_RESERVE_SHARE,
    PIN_SHARE_MAX,
    REUSE_COUNTS_MAX,
    REUSE_TENANTS_MAX,
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One agent's place in a tier."""

    key: AgentKey
    pieces: Mapping[Hashable, int]  # what is kept for it, by name: bytes
    idle_s: float  # since its last turn
    reuse_probability: float  # that there will be another one
    saves_s: float  # what that one would save
    is_active: bool = False
    is_pinned: bool = False
    is_replica: bool = False
    is_spent: bool = False
    is_superseded: bool = False  # the candidate is an agent's branches, apart from the agent

    @property
    def tenant(self) -> TenantId:
        """Tenant of the agent; tenants share no pieces."""
        return self.key[0]

    @property
    def size_bytes(self) -> int:
        """Bytes of all its pieces, shared or not."""
        return sum(self.pieces.values())


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's share of every tier, as fractions of the tier's budget."""

    quota: float = 1.0
    floor: float | None = None  # None: an equal share of what the configured floors leave
    disk_bytes: int | None = None  # of each node's disk at most, within the quota; None: no limit


def by_benefit(candidate: Candidate) -> float:
    """Rank by the seconds of prefill that one byte is expected to save, per second from now.

    An idle agent is expected to stay idle for about as long again.
    """
    expected_s = candidate.reuse_probability * candidate.saves_s / (1.0 + candidate.idle_s)
    return expected_s / max(1, candidate.size_bytes)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of fairness and value."""

    tenants: Mapping[TenantId, TenantShare] = field(default_factory=dict)
    pin_share: float = PIN_SHARE_MAX  # of a tenant's floor
    ttl_s: float = math.inf
    is_disk: bool = False  # whether limits of the disk apply
    rank: Callable[[Candidate], float] = by_benefit

    def quota_bytes(self, tenant: TenantId, budget_bytes: int) -> float:
        """Return the bytes of the budget that a tenant may hold at most."""
        share = self.tenants.get(tenant, TenantShare())
        limit_bytes = share.disk_bytes if self.is_disk else None
        quota_bytes = share.quota * budget_bytes
        return quota_bytes if limit_bytes is None else min(quota_bytes, limit_bytes)

    def floors_bytes(self, present: Iterable[TenantId], budget_bytes: int) -> dict[TenantId, float]:
        """Return each present tenant's floor: bytes that other tenants cannot evict."""
        floors = {tenant: s.floor for tenant, s in self.tenants.items() if s.floor is not None}
        tenants = set(present)
        default = max(0.0, 1.0 - math.fsum(floors.values())) / max(1, len(tenants - floors.keys()))
        return {
            tenant: min(
                floors.get(tenant, default) * budget_bytes,
                self.quota_bytes(tenant, budget_bytes),
            )
            for tenant in tenants
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """Victims in order, and the bytes free after their eviction; negative if still over budget."""

    dropped: tuple[Candidate, ...]
    held: frozenset[AgentKey]  # the pins that are honored
    free_bytes: float  # of the budget
    quota_free_bytes: Mapping[TenantId, float]  # of the quota of each tenant present


def choose(
    candidates: Sequence[Candidate],
    budget_bytes: int,
    rules: Rules,
    *,
    incoming: Mapping[TenantId, int] | None = None,
    free_share: float = 0.0,
) -> Choice:
    """Choose victims: expired agents, agents over a quota, then more until the rest fits.

    `incoming` bytes by tenant count as if they were stored. If room is short, evicts until
    `free_share` of the budget is free, so that the next writes need no eviction. A tenant within
    its floor loses nothing and active agents are never chosen, so the rest may still not fit.
    """
    tier = _Tier(candidates, budget_bytes, rules, incoming or {})
    tier.drop_expired()
    tier.drop_over_quota(1.0 - free_share)
    tier.drop_over_budget(1.0 - free_share)
    return tier.choice()


def tier_state(
    candidates: Sequence[Candidate],
    budget_bytes: int,
    rules: Rules,
    *,
    incoming: Mapping[TenantId, int] | None = None,
) -> Choice:
    """Return a tier's free bytes and honored pins, without choosing victims."""
    return _Tier(candidates, budget_bytes, rules, incoming or {}).choice()


def _held_pins(
    candidates: Sequence[Candidate], floors: Mapping[TenantId, float], rules: Rules
) -> frozenset[AgentKey]:
    """Choose the pins to honor, the most valuable first; the others have no effect."""
    room = {tenant: rules.pin_share * floor for tenant, floor in floors.items()}
    honored: set[AgentKey] = set()
    counted: set[Hashable] = set()
    pinned = (c for c in candidates if c.is_pinned and not c.is_spent)
    for candidate in sorted(pinned, key=lambda c: (-rules.rank(c), c.key)):
        fresh = {name: size for name, size in candidate.pieces.items() if name not in counted}
        size_bytes = sum(fresh.values())
        if size_bytes <= room[candidate.tenant]:
            room[candidate.tenant] -= size_bytes
            counted |= fresh.keys()
            honored.add(candidate.key)
    return frozenset(honored)


class _Tier:
    """Candidates of a tier, their sizes, and the victims so far."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        budget_bytes: int,
        rules: Rules,
        incoming: Mapping[TenantId, int],
    ) -> None:
        self._budget_bytes = budget_bytes
        self._rules = rules
        self._bytes = +Counter(incoming)  # tenants without bytes are left out
        self._referrers: Counter[Hashable] = Counter()
        for candidate in candidates:
            for name, size in candidate.pieces.items():
                self._bytes[candidate.tenant] += 0 if self._referrers[name] else size
                self._referrers[name] += 1
        self._total_bytes = sum(self._bytes.values())
        self._floors = rules.floors_bytes(
            {*self._bytes, *(c.tenant for c in candidates)}, budget_bytes
        )
        self._held = _held_pins(candidates, self._floors, rules)
        order = sorted(
            (not c.is_superseded, not c.is_replica, not c.is_spent, rules.rank(c), c.key, c)
            for c in candidates
            if not c.is_active
        )
        self._left = [candidate for *_, candidate in order]
        self._dropped: list[Candidate] = []

    def choice(self) -> Choice:
        quota_free_bytes = {
            tenant: self._rules.quota_bytes(tenant, self._budget_bytes) - held_bytes
            for tenant, held_bytes in self._bytes.items()
        }
        free_bytes = self._budget_bytes - self._total_bytes
        return Choice(tuple(self._dropped), self._held, free_bytes, quota_free_bytes)

    def drop_expired(self) -> None:
        self._sweep(lambda c: c.idle_s > self._rules.ttl_s, self._held)

    def drop_over_quota(self, fill: float) -> None:
        quotas = {t: self._rules.quota_bytes(t, self._budget_bytes) for t in self._bytes}
        over = {t: fill * quota for t, quota in quotas.items() if self._bytes[t] > quota}
        for kept in (self._held, ()):
            self._sweep(lambda c: self._bytes[c.tenant] > over.get(c.tenant, math.inf), kept)

    def drop_over_budget(self, fill: float) -> None:
        """Evict above floors; then until a tenant falls below its floor; then pinned agents too."""
        if self._total_bytes <= self._budget_bytes:
            return
        self._sweep(
            lambda c: self._total_bytes > fill * self._budget_bytes and self._keeps_floor(c),
            self._held,
        )
        for kept in (self._held, ()):
            self._sweep(
                lambda c: self._total_bytes > self._budget_bytes and self._is_above_floor(c),
                kept,
            )

    def _keeps_floor(self, candidate: Candidate) -> bool:
        left_bytes = self._bytes[candidate.tenant] - self._freed_bytes(candidate)
        return left_bytes >= self._floors[candidate.tenant]

    def _is_above_floor(self, candidate: Candidate) -> bool:
        return self._bytes[candidate.tenant] > self._floors[candidate.tenant]

    def _sweep(self, is_due: Callable[[Candidate], bool], kept: Collection[AgentKey]) -> None:
        """Drop candidates that are due, the least valuable first."""
        remaining = []
        for candidate in self._left:
            may_go = candidate.is_superseded or candidate.key not in kept
            if may_go and is_due(candidate):
                self._drop(candidate)
            else:
                remaining.append(candidate)
        self._left = remaining

    def _freed_bytes(self, candidate: Candidate) -> int:
        return sum(size for name, size in candidate.pieces.items() if self._referrers[name] == 1)

    def _drop(self, candidate: Candidate) -> None:
        freed_bytes = self._freed_bytes(candidate)
        self._bytes[candidate.tenant] -= freed_bytes
        self._total_bytes -= freed_bytes
        self._referrers.subtract(candidate.pieces.keys())
        self._dropped.append(candidate)


def disk_reserve_bytes(drive_bytes: int, usable_bytes: int) -> int:
    """Return how many bytes of a drive stay free.

    A tenth of the drive, 10 to 64 GiB. On a drive that is nearly full: half of what is free or
    holds stored agents (`usable_bytes`), so that agents are still stored there.
    """
    share = int(drive_bytes * DISK_RESERVE_SHARE)
    reserve_bytes = min(max(share, DISK_RESERVE_BYTES_MIN), DISK_RESERVE_BYTES_MAX)
    return min(reserve_bytes, max(0, usable_bytes) // 2)


def disk_capacity_bytes(drive_bytes: int, free_bytes: int, stored_bytes: int) -> int:
    """Return how many bytes of a drive stored agents may fill, regardless of the budget.

    Bytes that are stored already may stay, even if other files fill the drive.
    """
    reserve_bytes = disk_reserve_bytes(drive_bytes, free_bytes + stored_bytes)
    return stored_bytes + max(0, free_bytes - reserve_bytes)


TURNS_DISTINGUISHED_MAX = 31  # in five classes: 1, 2-3, 4-7, 8-15, and more
_PRIOR_AGENTS = 4  # added to the count of turns, as a prior
_PRIOR_RETURNS = 2  # added to the count of returns


class ReuseProbability:
    """Estimator of the probability that an agent returns; older counts lose weight."""

    def __init__(self) -> None:
        self._counts: dict[tuple[TenantId, int], tuple[int, int]] = {}  # turns, returns

    def note(self, tenant: TenantId, turns_count: int) -> None:
        """Count an agent's turn number `turns_count`, and a return after the turn before."""
        if turns_count > 1:
            self._add(tenant, turns_count - 1, 0, 1)
        self._add(tenant, turns_count, 1, 0)

    def note_all(self, tenant: TenantId, turns_count: int) -> None:
        """Count all turns so far of an agent that was not counted before."""
        for count in range(1, min(turns_count, TURNS_DISTINGUISHED_MAX) + 1):
            self.note(tenant, count)

    def probability(self, tenant: TenantId, turns_count: int) -> float:
        """Estimate the probability of another turn, above 0 and below 1."""
        turns, returns = self._counts.get((tenant, _class(turns_count)), (0, 0))
        return (min(returns, turns) + _PRIOR_RETURNS) / (turns + _PRIOR_AGENTS)

    def _add(self, tenant: TenantId, turns_count: int, turns: int, returns: int) -> None:
        key = (tenant, _class(turns_count))
        if key not in self._counts and len(self._counts) >= REUSE_TENANTS_MAX:
            self._counts.pop(next(iter(self._counts)))
        counts = self._counts.get(key, (0, 0))
        if counts[0] >= REUSE_COUNTS_MAX:
            counts = (counts[0] // 2, counts[1] // 2)
        self._counts[key] = (counts[0] + turns, counts[1] + returns)


def _class(turns_count: int) -> int:
    return min(max(turns_count, 1), TURNS_DISTINGUISHED_MAX).bit_length()

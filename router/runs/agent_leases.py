"""Agents that runs outside the router use: leased for seconds, and renewed while a run lives.

A run in the router needs no lease: the router knows that it goes on. Both are refused agents that
the other has (`Runs`).
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from fabric.errors import OverloadedError
from fabric.fair_share import FairShare
from fabric.ids import TenantId
from fabric.ports import Clock
from router.limits import SCENARIO_LEASE_S, SCENARIO_LEASES_MAX


@dataclass(frozen=True, slots=True)
class WantedLease:
    """A request for a lease; `key` tells runs of one name apart."""

    run: str
    key: str
    agents: frozenset[str]


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease as it is stored; without a time, as a new process gives it a whole one."""

    tenant: str
    run: str
    key: str
    agents: tuple[str, ...]


class AgentLeases:
    """Leases by tenant and key; an expired one is as good as none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[tuple[TenantId, str], tuple[WantedLease, float]] = {}
        self._places = FairShare[str](SCENARIO_LEASES_MAX)

    def take(self, tenant: TenantId, wanted: WantedLease) -> bool:
        """Lease agents, or renew a lease of the same key; say whether that changed anything.

        Raises OverloadedError.
        """
        self._drop_expired()
        place = tenant, wanted.key
        if place not in self._held and not self._places.take(tenant):
            message = "too many runs of the command line at once; wait until one ends"
            raise OverloadedError(message, retry_after_s=SCENARIO_LEASE_S, code="too_many_runs")
        known = self._held.get(place)
        self._held[place] = wanted, self._clock.monotonic_s() + SCENARIO_LEASE_S
        return known is None or known[0] != wanted

    def held(self) -> list[HeldLease]:
        """Return the leases that have not lapsed."""
        self._drop_expired()
        return [
            HeldLease(tenant, lease.run, key, tuple(sorted(lease.agents)))
            for (tenant, key), (lease, _) in self._held.items()
        ]

    def restore(self, leases: Iterable[HeldLease]) -> None:
        """Hold the leases of an earlier process: their runs have a whole term to renew them."""
        for lease in leases:
            with suppress(OverloadedError):
                wanted = WantedLease(lease.run, lease.key, frozenset(lease.agents))
                self.take(TenantId(lease.tenant), wanted)

    def release(self, tenant: TenantId, key: str) -> bool:
        """End a lease; say whether there was one."""
        if self._held.pop((tenant, key), None) is None:
            return False
        self._places.give(tenant)
        return True

    def find_user(self, tenant: TenantId, agents: Collection[str], key: str = "") -> str | None:
        """Name a run that has leased one of these agents by another key."""
        self._drop_expired()
        for (owner, held_by), (lease, _) in self._held.items():
            if owner == tenant and held_by != key and not lease.agents.isdisjoint(agents):
                return lease.run
        return None

    def _drop_expired(self) -> None:
        now_s = self._clock.monotonic_s()
        for tenant, key in [place for place, (_, end_s) in self._held.items() if end_s <= now_s]:
            self.release(tenant, key)

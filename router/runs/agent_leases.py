"""Agents that runs outside the router use: leased for seconds, and renewed while a run lives.

A run in the router needs no lease: the router knows that it goes on. Both are refused agents that
the other has (`Runs`).
"""

from collections.abc import Collection
from dataclasses import dataclass

from fabric.errors import OverloadedError
from fabric.fair_share import FairShare
from fabric.ids import TenantId
from fabric.limits import SCENARIO_LEASE_S, SCENARIO_LEASES_MAX
from fabric.ports import Clock


@dataclass(frozen=True, slots=True)
class WantedLease:
    """A request for a lease; `key` tells runs of one name apart."""

    run: str
    key: str
    agents: frozenset[str]


class AgentLeases:
    """Leases by tenant and key; an expired one is as good as none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[tuple[TenantId, str], tuple[WantedLease, float]] = {}
        self._places = FairShare[str](SCENARIO_LEASES_MAX)

    def take(self, tenant: TenantId, wanted: WantedLease) -> None:
        """Lease agents, or renew a lease of the same key; raise OverloadedError."""
        self._drop_expired()
        place = tenant, wanted.key
        if place not in self._held and not self._places.take(tenant):
            message = "too many runs of the command line at once; wait until one ends"
            raise OverloadedError(message, retry_after_s=SCENARIO_LEASE_S, code="too_many_runs")
        self._held[place] = wanted, self._clock.monotonic_s() + SCENARIO_LEASE_S

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

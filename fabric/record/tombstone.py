"""Erased agents, remembered so that no node which was away brings one of them back.

    erased at epoch e ──▶ records of epoch <= e go, wherever they turn up
                          a new agent of that name begins above e

A tombstone names tenant and agent by keyed digests: it outlives the agent and must not reveal
it. Sets of tombstones are merged in any order and any number of times, and two sets
are equal if their fingerprints are.

No time ends one: a record waits for as long as its node is off, and a calendar that is wrong at
boot would end all of them. Nor could they be counted in seconds of service, as idle time is: each
node would forget at another moment, and be told again by the others. Their number is bounded.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nsmallest
from typing import Final

from fabric.codec import pack
from fabric.errors import RejectedError
from fabric.ids import AgentId, TenantId
from fabric.kvcache.hashing import agent_digest
from fabric.limits import CONTROL_BYTES_MAX, EPOCH_ERASED_MAX, ERASED_S_MAX, TOMBSTONES_MAX
from fabric.record.envelope import Envelope

_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_FINGERPRINT_BITS = 53  # exact in JSON, too
SERIES_EPOCH: Final = 1  # of a tombstone that names lent rows; an erasure is far above it


@dataclass(frozen=True, slots=True)
class Tombstone:
    """An erasure: every record of this agent up to `epoch` is to go."""

    agent: str  # keyed digest, as in the record's file name
    tenant: str  # likewise
    epoch: int
    erased_s: float  # the order of erasures (`Tombstones.next_s`), the same on all nodes

    def __post_init__(self) -> None:
        digests = _DIGEST.fullmatch(self.agent) and _DIGEST.fullmatch(self.tenant)
        has_epoch = 0 < self.epoch <= EPOCH_ERASED_MAX
        if not digests or not has_epoch or not abs(self.erased_s) <= ERASED_S_MAX:
            message = "not a tombstone"
            raise RejectedError(message, code="invalid_tombstone")

    @property
    def rank(self) -> tuple[int, float]:
        """Of two tombstones of an agent the one of the higher rank counts."""
        return self.epoch, self.erased_s


def tenant_digest(cluster_key: bytes, tenant: TenantId) -> str:
    """Return the digest that names a tenant in its tombstones."""
    name = blake2b(tenant.encode(), digest_size=16, key=cluster_key, person=b"mf-erased")
    return name.hexdigest()


def tombstone(
    cluster_key: bytes, tenant: TenantId, agent: AgentId, epoch: int, erased_s: float
) -> Tombstone:
    """Return a tombstone up to `epoch`; raise RejectedError for an impossible epoch."""
    name = agent_digest(cluster_key, tenant, agent)
    return Tombstone(name, tenant_digest(cluster_key, tenant), epoch, erased_s)


def series_digest(cluster_key: bytes, tenant: TenantId, agent: AgentId, series: str) -> str:
    """Return the digest that names a series of rows that an agent lent."""
    name = f"{len(tenant)}:{tenant}{len(agent)}:{agent}{series}".encode()
    return blake2b(name, digest_size=16, key=cluster_key, person=b"mf-lent").hexdigest()


class Tombstones:
    """A bounded set of tombstones, one per agent."""

    def __init__(self) -> None:
        self._by_agent: dict[str, Tombstone] = {}
        self._fingerprint = 0
        self._latest_s = -math.inf

    def __len__(self) -> int:
        return len(self._by_agent)

    def __iter__(self) -> Iterator[Tombstone]:
        return iter([self._by_agent[name] for name in sorted(self._by_agent)])

    @property
    def agents(self) -> AbstractSet[str]:
        """The digests of the agents."""
        return self._by_agent.keys()

    def get(self, agent: str) -> Tombstone | None:
        """Return an agent's tombstone, by its digest."""
        return self._by_agent.get(agent)

    @property
    def fingerprint(self) -> int:
        """Return a digest of the set; 0 if it is empty."""
        return self._fingerprint

    def epoch_of(self, agent: str) -> int:
        """Return the epoch up to which an agent (by its digest) is erased; 0 if it is not."""
        tombstone = self._by_agent.get(agent)
        return tombstone.epoch if tombstone is not None else 0

    def next_s(self, wall_s: float) -> float:
        """Return the time of an erasure now: the wall clock's, but later than all known ones.

        So the oldest are the first to be dropped, whichever way the calendar went in between.
        """
        after_s = math.nextafter(self._latest_s, math.inf)
        return min(max(wall_s, after_s), ERASED_S_MAX)

    def merge(self, others: Iterable[Tombstone]) -> list[Tombstone]:
        """Merge another set; return what is new and was kept."""
        news = {}
        for other in others:
            known = self._by_agent.get(other.agent)
            if known is None or known.rank < other.rank:
                self._put(other)
                news[other.agent] = other
        self._bound()
        return [item for name, item in news.items() if self._by_agent.get(name) is item]

    def _put(self, item: Tombstone) -> None:
        self._drop(item.agent)
        self._by_agent[item.agent] = item
        self._fingerprint ^= _mark(item)
        self._latest_s = max(self._latest_s, item.erased_s)

    def _drop(self, agent: str) -> None:
        old = self._by_agent.pop(agent, None)
        if old is not None:
            self._fingerprint ^= _mark(old)

    def _bound(self) -> None:
        """Drop the oldest of the tenant with the most: one that erases a lot harms only itself."""
        while len(self._by_agent) > TOMBSTONES_MAX:
            counts = Counter(item.tenant for item in self._by_agent.values())
            most = max(counts, key=lambda tenant: (counts[tenant], tenant))
            theirs = [item for item in self._by_agent.values() if item.tenant == most]
            excess = len(self._by_agent) - TOMBSTONES_MAX
            second = max((n for tenant, n in counts.items() if tenant != most), default=0)
            many = max(1, min(excess, counts[most] - second))
            for item in nsmallest(many, theirs, key=_worth):
                self._drop(item.agent)


def _worth(item: Tombstone) -> tuple[bool, float, str]:
    """Order tombstones: those of lent rows go before those of agents, and the oldest first."""
    return item.epoch > SERIES_EPOCH, item.erased_s, item.agent


_ENVELOPE = Envelope(Tombstone, "tombstone", b"", CONTROL_BYTES_MAX)


def encode_tombstone(item: Tombstone) -> bytes:
    """Encode one for its file."""
    return _ENVELOPE.seal(pack(item))


def decode_tombstone(raw: bytes) -> Tombstone:
    """Decode what a file holds; raise CorruptDataError at any doubt."""
    return _ENVELOPE.open(raw)


def _mark(item: Tombstone) -> int:
    text = f"{item.agent}{item.tenant}{item.epoch}:{item.erased_s!r}".encode()
    digest = blake2b(text, digest_size=8, person=b"mf-erased").digest()
    return int.from_bytes(digest, "little") & ((1 << _FINGERPRINT_BITS) - 1)

"""Tombstones of erased agents, so that a node that was away does not bring an agent back.

    erased at epoch e ──▶ records of epochs <= e are removed wherever they turn up
                          a new agent of that name starts above e

A tombstone names tenant and agent by keyed digests, because it outlives the agent and must not
reveal it. Sets of tombstones can be merged in any order and repeatedly; two sets are equal if
their fingerprints are.

Tombstones do not expire by wall time: a node may be off for any time, and a wrong clock at boot
would expire them all. They do not expire by seconds of service either, like idle agents: each node
would drop one at a different time, and get it back from the others. Their number is bounded.
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
    """Erasure of an agent: all its records up to `epoch` must be removed."""

    agent: str  # keyed digest, as in the record's file name
    tenant: str  # keyed digest
    epoch: int
    erased_s: float  # orders erasures (`Tombstones.next_s`); the same on all nodes

    def __post_init__(self) -> None:
        digests = _DIGEST.fullmatch(self.agent) and _DIGEST.fullmatch(self.tenant)
        has_epoch = 0 < self.epoch <= EPOCH_ERASED_MAX
        if not digests or not has_epoch or not abs(self.erased_s) <= ERASED_S_MAX:
            message = "a tombstone has an invalid digest, epoch or time"
            raise RejectedError(message, code="invalid_tombstone")

    @property
    def rank(self) -> tuple[int, float]:
        """Rank of an agent's tombstones; the highest one replaces the others."""
        return self.epoch, self.erased_s


def tenant_digest(cluster_key: bytes, tenant: TenantId) -> str:
    """Return the digest that names a tenant in its tombstones."""
    name = blake2b(tenant.encode(), digest_size=16, key=cluster_key, person=b"mf-erased")
    return name.hexdigest()


def tombstone(
    cluster_key: bytes, tenant: TenantId, agent: AgentId, epoch: int, erased_s: float
) -> Tombstone:
    """Return a tombstone up to `epoch`; raise RejectedError for an epoch out of range."""
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
        """Return the time of a new erasure: the wall clock's, or just after the latest known one.

        So the oldest erasures are dropped first even if the wall clock went back.
        """
        after_s = math.nextafter(self._latest_s, math.inf)
        return min(max(wall_s, after_s), ERASED_S_MAX)

    def merge(self, others: Iterable[Tombstone]) -> list[Tombstone]:
        """Merge other tombstones; return those that were new and fit."""
        newer = {}
        for other in others:
            current = self._by_agent.get(other.agent)
            if current is None or current.rank < other.rank:
                self._put(other)
                newer[other.agent] = other
        self._bound()
        return [item for name, item in newer.items() if self._by_agent.get(name) is item]

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
        """Drop the oldest tombstones of the tenant with the most, so that others lose none."""
        while len(self._by_agent) > TOMBSTONES_MAX:
            counts = Counter(item.tenant for item in self._by_agent.values())
            most = max(counts, key=lambda tenant: (counts[tenant], tenant))
            tombstones = [item for item in self._by_agent.values() if item.tenant == most]
            excess = len(self._by_agent) - TOMBSTONES_MAX
            second = max((n for tenant, n in counts.items() if tenant != most), default=0)
            many = max(1, min(excess, counts[most] - second))
            for item in nsmallest(many, tombstones, key=_drop_order):
                self._drop(item.agent)


def _drop_order(item: Tombstone) -> tuple[bool, float, str]:
    """Sort key for dropping tombstones: those of lent rows first, then the oldest."""
    return item.epoch > SERIES_EPOCH, item.erased_s, item.agent


_ENVELOPE = Envelope(Tombstone, "tombstone", b"", CONTROL_BYTES_MAX)


def encode_tombstone(item: Tombstone) -> bytes:
    """Encode a tombstone for its file."""
    return _ENVELOPE.seal(pack(item))


def decode_tombstone(raw: bytes) -> Tombstone:
    """Decode a tombstone's file; raise CorruptDataError if it is not valid."""
    return _ENVELOPE.open(raw)


def _mark(item: Tombstone) -> int:
    text = f"{item.agent}{item.tenant}{item.epoch}:{item.erased_s!r}".encode()
    digest = blake2b(text, digest_size=8, person=b"mf-erased").digest()
    return int.from_bytes(digest, "little") & ((1 << _FINGERPRINT_BITS) - 1)

"""Leases on prefixes that several agents of other nodes share, held here for a limited time.

No record refers to these blocks, so each lease holds them. They are named under their tenant's
salt, like all blocks, and prompts that begin with them find them; an agent that continues one has
its blocks in its own record from then on. Leases are in memory only: after a restart their blocks
are swept. A lease ends when it expires, when the agent that it came from is erased or made private,
and before any agent is evicted for room.
"""

from dataclasses import dataclass

from fabric.ids import AgentKey
from fabric.kvcache.block_chain import BlockRef
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from node.limits import SPAN_LEASE_S, SPAN_RETURNS_MAX
from node.runtime.one_loop import on_its_loop
from node.store.block_store import BlockStore
from node.store.tombstones import TombstoneStore

_Name = tuple[AgentKey, BlockRef]  # the lender, and the prefix's last block


@dataclass(frozen=True, slots=True)
class _Lease:
    record: Manifest  # the prefix's record, under its lender's name and epoch
    refs: tuple[BlockRef, ...]
    until_s: float


class SpanLeases:
    """Leases of spans that a node lends; used on its event loop.

    The next sweep removes the blocks that they release.
    """

    def __init__(self, clock: Clock, blocks: BlockStore, erased: TombstoneStore) -> None:
        self._clock = clock
        self._blocks = blocks
        self._erased = erased
        self._leases: dict[_Name, _Lease] = {}
        self._returned: dict[AgentKey, float] = {}  # until when an agent's prefixes are refused

    @property
    def refs(self) -> frozenset[BlockRef]:
        """Return all held blocks."""
        return frozenset(ref for lease in self._leases.values() for ref in lease.refs)

    @property
    def records(self) -> list[Manifest]:
        """Return the records of all held prefixes, the last leased first."""
        return [lease.record for lease in reversed(self._leases.values())]

    def is_erased(self, lender: Manifest) -> bool:
        """Return whether the lender was erased at this epoch."""
        return self._erased.is_erased(lender.key, lender.epoch)

    @on_its_loop
    def keep(self, lender: Manifest) -> bool:
        """Hold the blocks of a prefix, or renew the lease; return whether all are stored."""
        refs, until_s = tuple(lender.refs), self._clock.monotonic_s() + SPAN_LEASE_S
        if lender.key in self._returned:
            return False
        if not refs or self._blocks.hold(refs):
            self._blocks.release(refs)
            return False
        name, distinct = (lender.key, lender.pieces[-1].block), set(refs)
        shorter = (n for n, lease in self._leases.items() if n[0] == lender.key)
        self._end([n for n in shorter if distinct.issuperset(self._leases[n].refs)])
        self._leases[name] = _Lease(lender, refs, until_s)
        return True

    @on_its_loop
    def forget(self, lender: AgentKey) -> bool:
        """End the leases of one agent's prefixes; return whether there were any."""
        return self._end([name for name in self._leases if name[0] == lender])

    @on_its_loop
    def give_back(self, lender: AgentKey) -> None:
        """End the leases of one agent's prefixes, and refuse new ones for a while."""
        self._returned.pop(lender, None)
        self._returned[lender] = self._clock.monotonic_s() + SPAN_LEASE_S
        if len(self._returned) > SPAN_RETURNS_MAX:
            del self._returned[next(iter(self._returned))]
        self.forget(lender)

    @on_its_loop
    def forget_erased(self) -> None:
        """End the leases of prefixes of erased agents."""
        floor = self._erased.floor
        self._end([n for n, lease in self._leases.items() if lease.record.epoch <= floor(*n[0])])

    @on_its_loop
    def expire(self) -> None:
        """End the leases that were not renewed in time."""
        now_s = self._clock.monotonic_s()
        self._returned = {key: end_s for key, end_s in self._returned.items() if end_s > now_s}
        self._end([name for name, lease in self._leases.items() if lease.until_s <= now_s])

    @on_its_loop
    def release_all(self) -> bool:
        """End all leases to make room; return whether there were any."""
        return self._end(list(self._leases))

    def _end(self, names: list[_Name]) -> bool:
        leases = [lease for name in names if (lease := self._leases.pop(name, None))]
        for lease in leases:
            self._blocks.release(lease.refs)
        return bool(leases)

"""Tombstones of erased agents on this node's disk: one small file per agent, for all models.

The router sends tombstones with each erasure, and again after this node was away. A tombstone takes
effect as soon as it is in memory. If the disk refuses it, it is written later, and only then
acknowledged.
"""

import logging
from collections.abc import Iterable
from threading import Lock
from typing import Final

from fabric.errors import CorruptDataError, StaleEpochError
from fabric.ids import AgentId, AgentKey, TenantId
from fabric.kvcache.hashing import agent_digest
from fabric.record.directive import is_to_forget, live_directives
from fabric.record.lenders import Lender, has_erased_lender
from fabric.record.manifest import Manifest
from fabric.record.tombstone import (
    SERIES_EPOCH,
    Tombstone,
    Tombstones,
    decode_tombstone,
    encode_tombstone,
    series_digest,
    tenant_digest,
)
from node.limits import TOMBSTONE_BYTES_MAX
from node.store.posix_disk import DiskError, PosixDisk

DIRECTORY: Final = "erased"
_AGENTS: Final = "agents"

_log = logging.getLogger(__name__)


class TombstoneStore:
    """The tombstones of one node; methods may be called from any thread."""

    def __init__(self, disk: PosixDisk, cluster_key: bytes) -> None:
        """Load all tombstones; raise DiskError if another process uses the folder."""
        self._disk = disk
        self._cluster_key = cluster_key
        self._writing = Lock()
        self._lock = Lock()  # guards memory; never held during a disk write
        self._all = Tombstones()
        self._unwritten: dict[str, Tombstone] = {}  # in memory only, by agent
        self._disk.recover()
        self._files: set[str] = set()  # digests of agents whose tombstone was written or read
        for leaf in self._disk.list_names(_AGENTS):
            self._load(leaf)
        self._remove_old()

    @property
    def fingerprint(self) -> int:
        """Digest of the set, equal on nodes and routers that know the same tombstones."""
        return self._all.fingerprint

    @property
    def all(self) -> tuple[Tombstone, ...]:
        with self._lock:
            return tuple(self._all)

    @property
    def is_all_written(self) -> bool:
        """Return whether all tombstones are on disk."""
        return not self._unwritten

    def epoch_of(self, digest: str) -> int:
        """Return the epoch up to which the agent with this digest is erased; 0 if it is not."""
        return self._all.epoch_of(digest)

    def claim_epoch(self, tenant: TenantId, agent: AgentId, epoch: int) -> int:
        """Return `epoch`; for 0, the first epoch above an erasure of that name.

        Raises StaleEpochError for an erased epoch; it does not increase the epoch, as the next
        epoch may belong to another node.
        """
        floor = self.floor(tenant, agent)
        if 0 < epoch <= floor:
            message = f"the agent was erased up to epoch {floor}; retry without epoch {epoch}"
            raise StaleEpochError(message, code="erased")
        return epoch or (floor + 1 if floor else 0)

    def digest(self, tenant: TenantId, agent: AgentId) -> str:
        """Return the digest that names an agent's tombstone and record file."""
        return agent_digest(self._cluster_key, tenant, agent)

    def lender(self, record: Manifest) -> Lender:
        """Return the entry that names an agent as a lender."""
        return Lender(self.digest(*record.key), record.epoch)

    def series(self, record: Manifest) -> Lender:
        """Return the entry that names the current series of an agent's rows."""
        digest = series_digest(self._cluster_key, *record.key, record.series or "")
        return Lender(digest, SERIES_EPOCH)

    def may_lend(self, record: Manifest) -> bool:
        """Return whether other agents may borrow rows of a record."""
        if record.is_private or is_to_forget(live_directives(record.directives)):
            return False
        return not len(self._all) or not self.has_erased_lender(
            record.tenant, (self.lender(record), self.series(record), *_lenders(record))
        )

    def revoke(self, record: Manifest) -> None:
        """Revoke all rows borrowed from a record's series. Raise DiskError."""
        tenant = tenant_digest(self._cluster_key, record.tenant)
        digest = self.series(record).agent
        with self._lock:
            erased_s = self._all.next_s(0.0)  # after all known tombstones
        self.note(Tombstone(digest, tenant, SERIES_EPOCH, erased_s))

    def has_erased_lender(self, tenant: TenantId, lenders: Iterable[Lender]) -> bool:
        """Return whether any of these lenders of a tenant's cache was erased."""
        lenders = tuple(lenders)
        if not lenders or not len(self._all):
            return False
        has_erasures = False
        if any(lender.is_any for lender in lenders):
            name = tenant_digest(self._cluster_key, tenant)
            has_erasures = any(item.tenant == name for item in self.all)
        return has_erased_lender(lenders, self.epoch_of, has_erasures=has_erasures)

    def is_derived(self, record: Manifest) -> bool:
        """Return whether a record contains rows that came from an erased agent."""
        return self.has_erased_lender(record.tenant, _lenders(record))

    def floor(self, tenant: TenantId, agent: AgentId) -> int:
        """Return the epoch up to which an agent is erased; 0 if it is not."""
        if not len(self._all):
            return 0
        return self.epoch_of(self.digest(tenant, agent))

    def is_erased(self, key: AgentKey, epoch: int) -> bool:
        """Return whether an agent is erased up to `epoch` or a later one."""
        return epoch <= self.floor(*key)

    def announce(self, erased: Iterable[Tombstone]) -> bool:
        """Add tombstones in memory, without waiting for the disk; return whether any is new."""
        with self._lock:
            news = self._all.merge(erased)
            self._unwritten.update((item.agent, item) for item in news)
        return bool(news)

    def note(self, tombstone: Tombstone) -> Tombstone:
        """Write a tombstone; return the stored one, which may be a later one of that agent.

        If it raises DiskError, the tombstone is in memory and will be written later.
        """
        self.announce([tombstone])
        with self._writing:
            with self._lock:
                latest = self._all.get(tombstone.agent) or tombstone
                is_owed = tombstone.agent in self._unwritten
            if is_owed:
                self._write(latest)
            self._write_rest()
            return latest

    def write_rest(self) -> bool:
        """Write the tombstones that are in memory only; return whether all are on disk now."""
        with self._writing:
            self._write_rest()
        return self.is_all_written

    def close(self) -> None:
        self._disk.close()

    def is_here(self) -> bool:
        """Return whether the folder is the one at its path."""
        return self._disk.is_here()

    def reopen(self) -> None:
        """Reopen the folder, read its tombstones, and write the missing ones; raise DiskError."""
        with self._writing:
            self._disk.reopen()
            with self._lock:
                self._files.clear()
            for leaf in self._disk.list_names(_AGENTS):
                self._load(leaf)
            with self._lock:  # stored tombstones may be older
                self._unwritten.update((item.agent, item) for item in self._all)
            self._write_rest()

    def _write(self, item: Tombstone) -> None:
        self._disk.publish(f"{_AGENTS}/{item.agent}", [encode_tombstone(item)])
        self._files.add(item.agent)
        self._settle(item)

    def _settle(self, item: Tombstone) -> None:
        """Mark a tombstone as written, unless a later one has replaced it."""
        with self._lock:
            if self._unwritten.get(item.agent) is item:
                del self._unwritten[item.agent]

    def _write_rest(self) -> None:
        with self._lock:
            unwritten = list(self._unwritten.values())
        try:
            for item in unwritten:
                if self._all.epoch_of(item.agent):
                    self._write(item)
                else:  # dropped, since there were too many
                    self._settle(item)
        except DiskError as error:
            _log.warning("tombstones are in memory only: %s", error.reason)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove the files of tombstones that were dropped because there were too many."""
        with self._lock:
            old = sorted(self._files - self._all.agents)
        for leaf in old:
            try:
                self._disk.remove(f"{_AGENTS}/{leaf}")
            except DiskError as error:
                _log.warning("cannot remove an old tombstone: %s", error.reason)
                return
            self._files.discard(leaf)

    def _load(self, leaf: str) -> None:
        try:
            item = decode_tombstone(self._disk.read(f"{_AGENTS}/{leaf}", TOMBSTONE_BYTES_MAX))
        except (CorruptDataError, DiskError, FileNotFoundError) as error:
            # Other nodes have it too: the router sends it again.
            _log.warning("a tombstone is damaged: %s", type(error).__name__)
            return
        if item.agent != leaf:
            _log.warning("a tombstone file has another agent's name")
            return
        self._files.add(leaf)
        self._all.merge([item])


def _lenders(record: Manifest) -> tuple[Lender, ...]:
    return record.edited.known_lenders if record.edited is not None else ()

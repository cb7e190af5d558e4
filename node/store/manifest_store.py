"""Records of agents on disk: one file each, replaced as a whole, never by an older record.

A failed publish leaves the previous record: if the new file is already in place, the old record is
written back, or the file is removed if there was none. If the disk refuses that too, a restart may
find either record; the agent's record is then doubtful until a later write succeeds.

A record that is damaged, or stored under another agent's name, is quarantined and counted as lost;
the node still starts. Methods may be called from any thread.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from fabric.errors import UNDECIDED, CorruptDataError, RetryLaterError, StaleEpochError
from fabric.ids import AgentKey
from fabric.kvcache.hashing import agent_digest
from fabric.limits import MANIFEST_BYTES_MAX
from fabric.record.manifest import Manifest, decode_manifest, encode_manifest
from fabric.record.stored_part import truncate_before_edits
from node.store.block_files import BlockDisk
from node.store.posix_disk import DiskError

DIRECTORY: Final = "manifests"

_log = logging.getLogger(__name__)

# (epoch, revision): the record with the higher one is the later.
Version = tuple[int, int]
_NOTHING: Final[Version] = (0, 0)


class ManifestStore:
    """The latest record of each agent of one node."""

    def __init__(
        self,
        disk: BlockDisk,
        cluster_key: bytes,
        erased: Callable[[str], int] = lambda _: 0,
        is_derived: Callable[[Manifest], bool] = lambda _: False,
    ) -> None:
        """Store records on `disk`; `erased` returns the epoch up to which an agent was erased.

        `erased` takes an agent's digest; `is_derived` returns whether a record's cache has rows
        that came from an erased agent.
        """
        self._is_derived = is_derived
        self._erased = erased
        self._disk = disk
        self._cluster_key = cluster_key
        # Also serializes writes, so that the later of two records stays.
        self._lock = threading.Lock()
        self._versions: dict[str, Version] = {}
        # The records to write back; None: remove the file.
        self._doubtful: dict[str, bytes | None] = {}
        self.lost_count = 0
        self.erased_count = 0  # removed when they were loaded

    def publish(self, manifest: Manifest, previous: Manifest | None = None) -> None:
        """Replace the agent's stored record by `manifest`; pass the stored one if it is known.

        Raises StaleEpochError if a later record is stored or the agent was erased. After a
        DiskError the stored record stays, unless the error's code is UNDECIDED.
        """
        name = self._name(manifest.key)
        if self._is_erased(name, manifest):
            message = "the agent was erased"
            raise StaleEpochError(message, code="erased")
        if self._is_derived(manifest):
            message = "the cache has rows of an agent that was erased; send the turn again"
            raise RetryLaterError(message, code="lender_erased")
        raw = encode_manifest(manifest)
        version = (manifest.epoch, manifest.revision)
        with self._lock:
            stored = self._stored_version(name)
            if version < stored:
                message = f"record {version} is older than the stored {stored}"
                raise StaleEpochError(message)
            before = self._before(name, stored, previous)
            try:
                self._disk.publish(name, [raw])
            except DiskError as error:
                if error.is_in_place:
                    self._doubtful[name] = _encode_record(before)
                    error.is_in_place = not self._put_back(name)
                    error.code = UNDECIDED if error.is_in_place else error.code
                raise
            except BaseException:
                del self._versions[name]  # read again by the next publish
                raise
            self._versions[name] = version
            self._doubtful.pop(name, None)

    def forget_versions(self) -> None:
        """Forget all versions of stored records: the folder is another one."""
        with self._lock:
            self._versions.clear()
            self._doubtful.clear()

    def version(self, key: AgentKey) -> Version:
        """Return epoch and revision of the stored record, or zeros without one; raise DiskError."""
        with self._lock:
            return self._stored_version(self._name(key))

    def set_aside(self, key: AgentKey, reason: str) -> None:
        """Quarantine an agent's record; raise DiskError."""
        name = self._name(key)
        with self._lock:
            self._versions.pop(name, None)
            self._disk.quarantine(name, reason)

    def is_doubtful(self, key: AgentKey) -> bool:
        """Return whether the disk may hold a record whose publish failed."""
        with self._lock:
            return self._name(key) in self._doubtful

    def settle(self, key: AgentKey) -> bool:
        """Write back the record before a failed publish; return whether none is doubtful now."""
        name = self._name(key)
        with self._lock:
            return name not in self._doubtful or self._put_back(name)

    def load_all(self) -> list[Manifest]:
        """Return all valid records; quarantine and count damaged ones, and remove erased ones.

        Raises DiskError for errors of the system, such as too many open files: continuing without
        a valid record would remove its blocks.
        """
        loaded = []
        with self._lock:
            for leaf in self._disk.list_names(DIRECTORY):
                name = f"{DIRECTORY}/{leaf}"
                manifest = self._load(name)
                if manifest is not None and self._is_erased(name, manifest):
                    # Erased while this node was down or served another model.
                    self._versions.pop(name, None)
                    self._disk.remove(name)
                    self.erased_count += 1
                elif manifest is not None:
                    loaded.append(self._without_derived(name, manifest))
        return loaded

    def _without_derived(self, name: str, manifest: Manifest) -> Manifest:
        if not self._is_derived(manifest):
            return manifest
        unedited = truncate_before_edits(manifest)
        self._disk.publish(name, [encode_manifest(unedited)])
        return unedited

    def remove(self, key: AgentKey) -> bool:
        """Remove an agent's record durably; return whether it existed."""
        name = self._name(key)
        with self._lock:
            self._versions.pop(name, None)
            existed = self._disk.remove(name)
            self._doubtful.pop(name, None)
            return existed

    def remove_erased(self, digests: Iterable[str] | None = None) -> int:
        """Remove the records of erased agents, of all or of these digests; return how many.

        Removes an unreadable record too, since it cannot be shown to be from a later epoch.
        """
        with self._lock:
            stored_digests = {leaf.removesuffix(".mf") for leaf in self._disk.list_names(DIRECTORY)}
            chosen = stored_digests if digests is None else stored_digests.intersection(digests)
            names = {d: f"{DIRECTORY}/{d}.mf" for d in sorted(chosen) if self._erased(d)}
            erased = [name for d, name in names.items() if self._epoch_at(name) <= self._erased(d)]
            for name in erased:
                self._versions.pop(name, None)
            removed = self._disk.remove_all(erased) if erased else 0
            for name in erased:
                self._doubtful.pop(name, None)
            return removed

    def is_named(self, leaf: str) -> bool:
        """Return whether a file, stored or quarantined, is the record of an erased agent."""
        digest, _, rest = leaf.partition(".")
        return rest.startswith("mf") and self._erased(digest) > 0

    def digest(self, key: AgentKey) -> str:
        """Return the digest that names an agent's record file."""
        return agent_digest(self._cluster_key, *key)

    def remove_all(self, agents: Iterable[AgentKey]) -> int:
        """Remove several agents' records durably; return how many existed."""
        names = [self._name(key) for key in agents]
        with self._lock:
            for name in names:
                self._versions.pop(name, None)
            existed_count = self._disk.remove_all(names)
            for name in names:
                self._doubtful.pop(name, None)
            return existed_count

    def _name(self, key: AgentKey) -> str:
        return f"{DIRECTORY}/{self.digest(key)}.mf"

    def _epoch_at(self, name: str) -> int:
        try:
            return self._read(name).epoch
        except (CorruptDataError, FileNotFoundError):
            return 0

    def _is_erased(self, name: str, manifest: Manifest) -> bool:
        digest = name.removeprefix(f"{DIRECTORY}/").removesuffix(".mf")
        return manifest.epoch <= self._erased(digest)

    def _before(
        self, name: str, stored: Version, previous: Manifest | None
    ) -> Manifest | bytes | None:
        """Return the record that a failed publish must leave; read the disk only if necessary."""
        if name in self._doubtful:
            return self._doubtful[name]
        if previous is not None and (previous.epoch, previous.revision) == stored:
            return previous
        return self._disk.read(name, MANIFEST_BYTES_MAX) if stored != _NOTHING else None

    def _put_back(self, name: str) -> bool:
        before = self._doubtful[name]
        try:
            if before is None:
                self._disk.remove(name)
            else:
                self._disk.publish(name, [before])
        except DiskError as error:
            _log.error("cannot write a record back; either of two may be stored: %s", error.reason)
            return False
        del self._doubtful[name]
        return True

    def _stored_version(self, name: str) -> Version:
        if name not in self._versions:
            try:
                self._read(name)
            except FileNotFoundError:
                self._versions[name] = _NOTHING
            except CorruptDataError as error:
                self._lose(name, error.message)
                self._versions[name] = _NOTHING
        return self._versions[name]

    def _load(self, name: str) -> Manifest | None:
        try:
            return self._read(name)
        except FileNotFoundError:
            return None
        except CorruptDataError as error:
            self._lose(name, error.message)
        return None

    def _read(self, name: str) -> Manifest:
        try:
            manifest = decode_manifest(self._disk.read(name, MANIFEST_BYTES_MAX))
        except DiskError as error:
            if error.is_damage:
                raise CorruptDataError(error.message) from error
            raise
        if self._name(manifest.key) != name:
            message = "the file holds another agent's record"
            raise CorruptDataError(message)
        self._versions[name] = (manifest.epoch, manifest.revision)
        return manifest

    def _lose(self, name: str, reason: str) -> None:
        self.lost_count += 1
        try:
            self._disk.quarantine(name, reason)
        except DiskError as failure:
            _log.error("cannot quarantine %s: %s", name, failure.message)


def _encode_record(record: Manifest | bytes | None) -> bytes | None:
    return encode_manifest(record) if isinstance(record, Manifest) else record

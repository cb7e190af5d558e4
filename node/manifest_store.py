"""Records of agents on disk: one file each, replaced as a whole, never by an older one.

A record that is damaged or lies under another agent's name is quarantined and counted as
lost; it does not keep a node from starting. Methods may be called from any thread.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Final

from fabric.errors import CorruptDataError, StaleEpochError
from fabric.hashing import agent_digest
from fabric.ids import AgentId, TenantId
from fabric.limits import MANIFEST_BYTES_MAX
from fabric.manifest import Manifest, decode_manifest, encode_manifest
from node.block_files import BlockDisk
from node.posix_disk import DiskError

DIRECTORY: Final = "manifests"

_log = logging.getLogger(__name__)

# Epoch, then revision: what decides which of two records is the later one.
Version = tuple[int, int]


class ManifestStore:
    """The latest record of each agent of one node."""

    def __init__(
        self, disk: BlockDisk, cluster_key: bytes, erased: Callable[[str], int] = lambda _: 0
    ) -> None:
        """Keep records on `disk`; `erased` tells by an agent's digest which epochs must go."""
        self._erased = erased
        self._disk = disk
        self._cluster_key = cluster_key
        self._lock = threading.Lock()  # also orders writes: of two records the later one stays
        self._versions: dict[str, Version] = {}
        self.lost_count = 0
        self.erased_count = 0  # removed when they were loaded

    def publish(self, manifest: Manifest) -> None:
        """Make `manifest` its agent's record.

        Raises StaleEpochError if a later one is stored, or if it was erased.
        """
        name = self._name(manifest.tenant, manifest.agent)
        if self._is_erased(name, manifest):
            message = "the agent was erased"
            raise StaleEpochError(message, code="erased")
        raw = encode_manifest(manifest)
        version = (manifest.epoch, manifest.revision)
        with self._lock:
            stored = self._stored_version(name)
            if version < stored:
                message = f"record {version} is older than the stored {stored}"
                raise StaleEpochError(message)
            # Not known again until this succeeds: a failure may leave either record.
            del self._versions[name]
            self._disk.publish(name, [raw])
            self._versions[name] = version

    def load_all(self) -> list[Manifest]:
        """Return every sound record; quarantine and count the damaged ones, remove erased ones.

        Raises DiskError where the system, not a record, is at fault, such as too many open
        files: who goes on without a sound record would remove its blocks.
        """
        loaded = []
        with self._lock:
            for leaf in self._disk.list_names(DIRECTORY):
                name = f"{DIRECTORY}/{leaf}"
                manifest = self._load(name)
                if manifest is not None and self._is_erased(name, manifest):
                    # Erased while this node was away, or served another model.
                    self._versions.pop(name, None)
                    self._disk.remove(name)
                    self.erased_count += 1
                elif manifest is not None:
                    loaded.append(manifest)
        return loaded

    def remove(self, tenant: TenantId, agent: AgentId) -> bool:
        """Remove an agent's record durably; return whether there was one."""
        name = self._name(tenant, agent)
        with self._lock:
            self._versions.pop(name, None)
            return self._disk.remove(name)

    def remove_all(self, agents: Iterable[tuple[TenantId, AgentId]]) -> int:
        """Remove several agents' records durably; count them."""
        names = [self._name(tenant, agent) for tenant, agent in agents]
        with self._lock:
            for name in names:
                self._versions.pop(name, None)
            return self._disk.remove_all(names)

    def _name(self, tenant: TenantId, agent: AgentId) -> str:
        return f"{DIRECTORY}/{agent_digest(self._cluster_key, tenant, agent)}.mf"

    def _is_erased(self, name: str, manifest: Manifest) -> bool:
        digest = name.removeprefix(f"{DIRECTORY}/").removesuffix(".mf")
        return manifest.epoch <= self._erased(digest)

    def _stored_version(self, name: str) -> Version:
        if name not in self._versions:
            try:
                self._read(name)
            except FileNotFoundError:
                self._versions[name] = (0, 0)
            except CorruptDataError as error:
                self._lose(name, error.message)
                self._versions[name] = (0, 0)
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
        if self._name(manifest.tenant, manifest.agent) != name:
            message = "record of another agent"
            raise CorruptDataError(message)
        self._versions[name] = (manifest.epoch, manifest.revision)
        return manifest

    def _lose(self, name: str, reason: str) -> None:
        self.lost_count += 1
        try:
            self._disk.quarantine(name, reason)
        except DiskError as failure:
            _log.error("cannot quarantine %s: %s", name, failure.message)

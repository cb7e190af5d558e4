"""Folders of models that are not served now: measured, removed when expired, and erased from.

A folder is kept until its model is served again, but is the first to be removed when the disk is
short of room.

An erasure removes the records of erased agents in these folders, the blocks that no other record
refers to, and the whole quarantine, since the owner of a damaged block is unknown.
"""

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from fabric.control.erasure_calls import RemovedElsewhere
from fabric.errors import CorruptDataError, FatalError
from fabric.limits import KIB, MANIFEST_BYTES_MAX
from fabric.ports import Clock
from fabric.record.manifest import Manifest, decode_manifest
from node.limits import FOLDERS_EVERY_S
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.block_files import DIRECTORY as BLOCKS
from node.store.block_files import file_name
from node.store.encrypted_disk import open_disk
from node.store.manifest_store import DIRECTORY as RECORDS
from node.store.model_folders import ModelFolder, ModelFolders, folder_name, model_folders
from node.store.posix_disk import QUARANTINE, TEMPORARY, DiskError, PosixDisk
from node.store.service_time import ServiceTime

_log = logging.getLogger(__name__)


class OtherFolders:
    """A node's folders of other models; used on its event loop."""

    def __init__(
        self, identity: NodeIdentity, clock: Clock, workers: Workers, service_time: ServiceTime
    ) -> None:
        self._clock = clock
        self._workers = workers
        self._service_time = service_time
        self._ttl_s = identity.settings.disk_ttl_s
        self._served = folder_name(identity.fingerprint)
        self._folders = ModelFolders(identity.config.data_dir, self._served, service_time.folder_s)
        self._measured_s: float | None = None
        self.found: list[ModelFolder] = []

    @property
    def size_bytes(self) -> int:
        return sum(folder.size_bytes for folder in self.found)

    async def measure(self) -> None:
        """Measure the folders from time to time; remove those unused for too long."""
        now_s = self._clock.monotonic_s()
        if self._measured_s is not None and now_s - self._measured_s < FOLDERS_EVERY_S:
            return
        is_first, self._measured_s = self._measured_s is None, now_s
        self.found = await self._workers.run(self._folders.list_all)
        if is_first and self.found:
            _log.info(
                "agents of other models, or of other versions of their code, wait in %d folders "
                "(%d KiB): these are removed first when room is short",
                len(self.found),
                self.size_bytes // KIB,
            )
        limit_s = self._service_time.now_s - self._ttl_s
        self._service_time.note(self._served, {folder.name for folder in self.found})
        for folder in [folder for folder in self.found if folder.used_s < limit_s]:
            await self.remove(folder)

    async def remove(self, folder: ModelFolder) -> None:
        """Remove a folder, unless another process uses it."""
        if await self._workers.run(lambda: self._folders.remove(folder)):
            self.found.remove(folder)


class ErasedFolders:
    """All model folders of a node but the served one; methods block on the disk."""

    def __init__(
        self,
        data_dir: Path,
        served: str,
        durability: str,
        cluster_key: bytes,
        epoch_of: Callable[[str], int],
    ) -> None:
        """Search below `data_dir`; `epoch_of` returns the epoch up to which a digest is erased."""
        self._data_dir = data_dir.expanduser()
        self._served = served
        self._durability = durability
        self._cluster_key = cluster_key
        self._epoch_of = epoch_of

    def erase(self, only: str | None = None, *, is_sure: bool = True) -> RemovedElsewhere:
        """Remove all erased agents, or the one with the digest `only`; raise DiskError.

        Raises DiskError for a folder that another process uses, too; the caller retries. With
        `is_sure`, also empties quarantines of folders without an erased record, since a
        quarantined block may belong to one.
        """
        records = blocks = size_bytes = 0
        for name in model_folders(self._data_dir):
            if name == self._served or not self._has_any(
                self._data_dir / name, only, is_sure=is_sure
            ):
                continue
            try:
                disk = open_disk(self._data_dir / name, self._durability, self._cluster_key)
            except FatalError:
                # Another cluster key gives other names and contents.
                _log.warning("a folder encrypted with another cluster key is left alone")
                continue
            try:
                disk.recover()  # removes partial files that a crash left
                removed = self._erase_in(disk, only)
            finally:
                disk.close()
            records, blocks = records + removed.records, blocks + removed.blocks
            size_bytes += removed.bytes
        return RemovedElsewhere(records, blocks, size_bytes)

    def _has_any(self, folder: Path, only: str | None, *, is_sure: bool) -> bool:
        """Return whether a folder may hold erased files, by its file names alone."""
        damaged, records = _list_leaves(folder / QUARANTINE), _list_leaves(folder / RECORDS)
        if damaged and (is_sure or any(self._is_named(leaf, only) for leaf in damaged)):
            return True
        if any(leaf.startswith(TEMPORARY) for leaf in [*records, *_list_leaves(folder / BLOCKS)]):
            return True
        return any(self._is_named(leaf, only) for leaf in records)

    def _is_named(self, leaf: str, only: str | None) -> bool:
        digest = leaf.partition(".")[0]
        return self._epoch_of(digest) > 0 and only in (None, digest)

    def _erase_in(self, disk: PosixDisk, only: str | None) -> RemovedElsewhere:
        damaged = disk.list_names(QUARANTINE)
        due = []
        for leaf in disk.list_names(RECORDS):
            if self._is_named(leaf, only):
                record = _read(disk, leaf)
                # An unreadable record may be the erased one.
                if record is None or record.epoch <= self._epoch_of(leaf.partition(".")[0]):
                    due.append(leaf)
        paths = [f"{RECORDS}/{leaf}" for leaf in due] + [f"{QUARANTINE}/{leaf}" for leaf in damaged]
        if paths:
            disk.remove_all(paths)
        size_bytes, blocks = _remove_unneeded(disk) if due else (0, 0)
        return RemovedElsewhere(
            records=len(due) + sum(self._is_named(leaf, only) for leaf in damaged),
            blocks=blocks,
            bytes=size_bytes,
        )


def _remove_unneeded(disk: PosixDisk) -> tuple[int, int]:
    """Remove blocks that no readable record refers to, as recovery does; return bytes and count."""
    needed: set[str] = set()
    for leaf in disk.list_names(RECORDS):
        record = _read(disk, leaf)
        if record is not None:
            needed.update(map(file_name, record.kept_refs))
    stored = [f"{BLOCKS}/{leaf}" for leaf in disk.list_names(BLOCKS)]
    unneeded = [name for name in stored if name not in needed]
    size_bytes = sum(disk.size_bytes(name) for name in unneeded)
    disk.remove_all(unneeded)
    return size_bytes, len(unneeded)


def _read(disk: PosixDisk, leaf: str) -> Manifest | None:
    """Read a record; None if it is damaged or missing. Raise DiskError for errors of the system."""
    try:
        return decode_manifest(disk.read(f"{RECORDS}/{leaf}", MANIFEST_BYTES_MAX))
    except (CorruptDataError, FileNotFoundError):
        return None
    except DiskError as error:
        if not error.is_damage:
            raise
        return None


def _list_leaves(folder: Path) -> Collection[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return ()
    except OSError as error:
        message = f"cannot list {folder}: {error.strerror}"
        raise DiskError(message, error.errno) from error

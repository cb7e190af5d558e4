"""Erasures in the folders of models that are not served now.

Records of erased agents are removed there with the blocks that no other record refers to, and the
whole quarantine, since the owner of a damaged block is unknown.
"""

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from fabric.control.erasure_calls import RemovedElsewhere
from fabric.errors import CorruptDataError, FatalError
from fabric.limits import MANIFEST_BYTES_MAX
from fabric.record.manifest import Manifest, decode_manifest
from node.store.block_files import DIRECTORY as BLOCKS
from node.store.block_files import file_name
from node.store.encrypted_disk import open_disk
from node.store.manifest_store import DIRECTORY as RECORDS
from node.store.model_folders import model_folders
from node.store.posix_disk import QUARANTINE, TEMPORARY, DiskError, PosixDisk

_log = logging.getLogger(__name__)


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
        """Search below `data_dir`; `epoch_of` maps an agent's digest to its erased epochs."""
        self._data_dir = data_dir.expanduser()
        self._served = served
        self._durability = durability
        self._cluster_key = cluster_key
        self._epoch_of = epoch_of

    def erase(self, only: str | None = None, *, is_sure: bool = True) -> RemovedElsewhere:
        """Remove what is erased, or of one agent by its digest; raise DiskError.

        A folder that another process uses raises, too: it is tried again. `is_sure`: also what
        is quarantined where no erased record is, since it may be a block of one.
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
                # Under another cluster key names and contents are others, too.
                _log.warning("a folder encrypted with another cluster key is left alone")
                continue
            try:
                disk.recover()  # a crash may have left a part of any record
                removed = self._erase_in(disk, only)
            finally:
                disk.close()
            records, blocks = records + removed.records, blocks + removed.blocks
            size_bytes += removed.bytes
        return RemovedElsewhere(records, blocks, size_bytes)

    def _has_any(self, folder: Path, only: str | None, *, is_sure: bool) -> bool:
        """Glance at a folder's names, so that an untouched one costs no flush."""
        damaged, records = _leaves(folder / QUARANTINE), _leaves(folder / RECORDS)
        if damaged and (is_sure or any(self._is_named(leaf, only) for leaf in damaged)):
            return True
        if any(leaf.startswith(TEMPORARY) for leaf in [*records, *_leaves(folder / BLOCKS)]):
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
                # One that cannot be read may be the erased one.
                if record is None or record.epoch <= self._epoch_of(leaf.partition(".")[0]):
                    due.append(leaf)
        gone = [f"{RECORDS}/{leaf}" for leaf in due] + [f"{QUARANTINE}/{leaf}" for leaf in damaged]
        if gone:
            disk.remove_all(gone)
        size_bytes, blocks = _remove_unneeded(disk) if due else (0, 0)
        return RemovedElsewhere(
            records=len(due) + sum(self._is_named(leaf, only) for leaf in damaged),
            blocks=blocks,
            bytes=size_bytes,
        )


def _remove_unneeded(disk: PosixDisk) -> tuple[int, int]:
    """Remove the blocks that no readable record refers to, as recovery does; return how much."""
    needed: set[str] = set()
    for leaf in disk.list_names(RECORDS):
        record = _read(disk, leaf)
        if record is not None:
            needed.update(map(file_name, record.refs))
    stored = [f"{BLOCKS}/{leaf}" for leaf in disk.list_names(BLOCKS)]
    unneeded = [name for name in stored if name not in needed]
    size_bytes = sum(disk.size_bytes(name) for name in unneeded)
    disk.remove_all(unneeded)
    return size_bytes, len(unneeded)


def _read(disk: PosixDisk, leaf: str) -> Manifest | None:
    """Read a record; None if it is damaged. Raise DiskError where the system is at fault."""
    try:
        return decode_manifest(disk.read(f"{RECORDS}/{leaf}", MANIFEST_BYTES_MAX))
    except (CorruptDataError, FileNotFoundError):
        return None
    except DiskError as error:
        if not error.is_damage:
            raise
        return None


def _leaves(folder: Path) -> Collection[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return ()
    except OSError as error:
        message = f"cannot list {folder}: {error.strerror}"
        raise DiskError(message, error.errno) from error

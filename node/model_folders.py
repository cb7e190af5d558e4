"""Folders of other models below a node's data folder: they wait for their model, not forever.

A folder that another process serves is locked by it (`PosixDisk.claim`) and left alone.
"""

import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.ids import Fingerprint
from node.manifest_store import DIRECTORY as RECORDS
from node.posix_disk import DiskError, PosixDisk

_NAME_CHARS: Final = 16
_NAME: Final = re.compile(rf"[0-9a-f]{{{_NAME_CHARS}}}", re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What one model's agents left behind."""

    name: str
    size_bytes: int
    used_s: float  # calendar time of the last record


def folder_name(fingerprint: Fingerprint) -> str:
    """Name the folder of a model's agents."""
    return fingerprint.hex()[:_NAME_CHARS]


class ModelFolders:
    """The folders of a node except the one it serves."""

    def __init__(self, data_dir: Path, served: str) -> None:
        self._data_dir = data_dir.expanduser()
        self._served = served

    def list_all(self) -> list[ModelFolder]:
        """Measure the folders, least recently used first."""
        try:
            with os.scandir(self._data_dir) as entries:
                names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as error:
            _log.warning("cannot list the folders of other models: %s", error.strerror)
            return []
        others = (name for name in names if _NAME.fullmatch(name) and name != self._served)
        found = [_measured(self._data_dir / name) for name in others]
        return sorted(found, key=lambda folder: (folder.used_s, folder.name))

    def remove(self, folder: ModelFolder) -> bool:
        """Remove a folder nobody serves; say whether it is gone."""
        path = self._data_dir / folder.name
        try:
            disk = PosixDisk(path, "none")
        except DiskError as error:
            _log.warning("left another model's folder alone: %s", error.reason)
            return False
        try:
            disk.claim()
            shutil.rmtree(path)  # opens every folder relative to its parent, follows no link
        except (DiskError, OSError) as error:
            _log.warning("left another model's folder, or a part of it: %s", type(error).__name__)
            return False
        finally:
            disk.close()
        _log.info("removed %d bytes of another model's agents", folder.size_bytes)
        return True


def _measured(path: Path) -> ModelFolder:
    size_bytes, used_s = 0, 0.0
    for at, _, names in os.walk(path, onerror=lambda _: None):
        for name in names:
            try:
                found = (Path(at) / name).lstat()
            except OSError:
                continue  # removed meanwhile
            size_bytes += found.st_size
            if Path(at).name == RECORDS:
                used_s = max(used_s, found.st_mtime)
    if not used_s:
        used_s = path.lstat().st_mtime  # no agents: perhaps not yet
    return ModelFolder(path.name, size_bytes, used_s)

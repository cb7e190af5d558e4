"""Folders of other models in a node's data folder: kept until served again or expired.

A folder that another process serves is locked by it (`PosixDisk.claim`) and left alone.
"""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.ids import Fingerprint
from node.store.posix_disk import DiskError, PosixDisk

_NAME_CHARS: Final = 16
_NAME: Final = re.compile(rf"[0-9a-f]{{{_NAME_CHARS}}}", re.ASCII)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Folder of one model's agents."""

    name: str
    size_bytes: int
    used_s: float  # service time when it was last served


def folder_name(fingerprint: Fingerprint) -> str:
    """Name the folder of a model's agents."""
    return fingerprint.hex()[:_NAME_CHARS]


def model_folders(data_dir: Path) -> list[str]:
    """Name the folders of all models that this node has served; raise OSError."""
    try:
        with os.scandir(data_dir) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted(name for name in names if _NAME.fullmatch(name))


class ModelFolders:
    """The folders of a node except the one it serves."""

    def __init__(
        self, data_dir: Path, served: str, used_s: Callable[[str], float] = lambda _: 0.0
    ) -> None:
        self._data_dir = data_dir.expanduser()
        self._used_s = used_s
        self._served = served

    def list_all(self) -> list[ModelFolder]:
        """Measure the folders, least recently used first."""
        try:
            names = model_folders(self._data_dir)
        except OSError as error:
            _log.warning("cannot list the folders of other models: %s", error.strerror)
            return []
        folders = [
            ModelFolder(name, _size_bytes(self._data_dir / name), self._used_s(name))
            for name in names
            if name != self._served
        ]
        return sorted(folders, key=lambda folder: (folder.used_s, folder.name))

    def remove(self, folder: ModelFolder) -> bool:
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


def _size_bytes(path: Path) -> int:
    size_bytes = 0
    for at, _, names in os.walk(path, onerror=lambda _: None):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile
                size_bytes += (Path(at) / name).lstat().st_size
    return size_bytes

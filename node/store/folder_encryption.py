"""Encrypt what was stored before `node.encrypt_at_rest` was turned on, in every model's folder.

The served folder is encrypted before it is used. Those of other models follow beside the turns, a
part at a time, each claimed meanwhile, and the node's health says so until none is left. A node
that ends in the middle goes on with what is left at its next start.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabric.errors import FatalError
from fabric.limits import SEAL_RETRY_S, SEAL_STEP_BYTES
from node.background_loop import BackgroundLoop
from node.store.encrypted_disk import SealedDisk, open_disk
from node.store.model_folders import ModelFolders, folder_name
from node.store.posix_disk import DiskError

if TYPE_CHECKING:
    from node.node import Node

TROUBLE: Final = "encryption"
_PAUSE_S: Final = 0.01

_log = logging.getLogger(__name__)


class FolderSealing:
    """One node's folders of other models; lives on its event loop."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._folders = ModelFolders(node.config.data_dir, folder_name(node.fingerprint))
        self._loop = BackgroundLoop("encrypting what is stored", self.step, node.note_failed_round)
        self._waiting: list[str] = []
        self._failed: set[str] = set()
        self._current: Iterator[int] | None = None
        self._is_listed = False

    def start(self) -> None:
        """Begin, if the settings say that what is stored is encrypted."""
        if self._node.settings.encrypt_at_rest:
            self._loop.start()

    async def stop(self) -> None:
        """End, once the part under way is encrypted."""
        await self._loop.stop()
        self._current = None  # closes the folder

    async def step(self) -> float:
        """Encrypt a part; return the seconds to wait for the next."""
        if not self._is_listed:
            found = await self._node.in_worker(self._folders.list_all)
            self._waiting, self._is_listed = [folder.name for folder in found], True
            self._failed.clear()
        self._say()
        if self._current is None and not self._waiting:
            self._is_listed = not self._failed  # those that another process has, say
            return SEAL_RETRY_S
        await self._node.in_worker(self._seal_some)
        self._say()
        return _PAUSE_S

    def _say(self) -> None:
        left = len(self._waiting) + len(self._failed) + (self._current is not None)
        if left:
            words = f"{left} folders of other models are not encrypted yet"
            self._node.troubles[TROUBLE] = words
        else:
            self._node.troubles.pop(TROUBLE, None)

    def _seal_some(self) -> None:
        if self._current is None:
            self._current = self._seal(self._waiting.pop(0))
        done_bytes = 0
        for size_bytes in self._current:
            done_bytes += size_bytes
            if done_bytes >= SEAL_STEP_BYTES:
                return
        self._current = None

    def _seal(self, name: str) -> Iterator[int]:
        """Encrypt one folder, a file at each step; yield their bytes."""
        config, path = self._node.config, Path(self._node.config.data_dir).expanduser() / name
        disk = None
        try:
            disk = open_disk(path, config.settings.durability, config.cluster_key, seals=True)
            disk.recover()  # what a crash left half-written is not encrypted either
            assert isinstance(disk, SealedDisk), "it was asked to encrypt"
            yield from disk.sealing()
            _log.info("encrypted the folder %s", name)
        except (DiskError, FatalError) as error:
            self._failed.add(name)
            _log.error("cannot encrypt the folder %s: %s", name, error.message)
        finally:
            if disk is not None:
                disk.close()

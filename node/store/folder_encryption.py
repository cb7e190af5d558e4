"""Encryption of files from before `node.encrypt_at_rest` was turned on, in every model's folder.

The served folder is encrypted before it is used. Other models' folders follow in the background, a
part at a time, each locked for as long, and the node's health reports how many are left. A node
that stops half-way continues at its next start.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fabric.errors import FatalError
from fabric.limits import ENCRYPTION_RETRY_S
from node.background_loop import BackgroundLoop
from node.limits import ENCRYPTION_STEP_BYTES
from node.runtime.health import Health
from node.runtime.identity import NodeConfig, NodeIdentity
from node.runtime.workers import Workers
from node.store.encrypted_disk import EncryptedDisk, open_disk
from node.store.model_folders import ModelFolders, folder_name
from node.store.posix_disk import DiskError

TROUBLE: Final = "encryption"
_PAUSE_S: Final = 0.01

_log = logging.getLogger(__name__)


class FolderEncryption:
    """Encrypts a node's folders of other models; used on its event loop."""

    def __init__(self, identity: NodeIdentity, workers: Workers, health: Health) -> None:
        self._config = identity.config
        self._workers = workers
        self._health = health
        self._folders = ModelFolders(self._config.data_dir, folder_name(identity.fingerprint))
        self._loop = BackgroundLoop(
            "encrypting what is stored", self.step, health.note_failed_round
        )
        self._waiting: list[str] = []
        self._failed: set[str] = set()
        self._current: Iterator[int] | None = None
        self._name = ""  # name of the folder that is being encrypted
        self._is_listed = False

    def start(self) -> None:
        """Start if the settings enable encryption."""
        if self._config.settings.encrypt_at_rest:
            self._loop.start()

    async def stop(self) -> None:
        """Stop once the current part is encrypted."""
        await self._loop.stop()
        self._current = None  # closes the folder

    async def step(self) -> float:
        """Encrypt a part; return the seconds to wait for the next."""
        if not self._is_listed:
            folders = await self._workers.run(self._folders.list_all)
            self._waiting, self._is_listed = [folder.name for folder in folders], True
            self._failed.clear()
        self._report()
        if self._current is None and not self._waiting:
            self._is_listed = not self._failed  # for example those that another process has locked
            return ENCRYPTION_RETRY_S
        await self._encrypt_some()
        self._report()
        return _PAUSE_S

    def _report(self) -> None:
        left_count = len(self._waiting) + len(self._failed) + (self._current is not None)
        if left_count:
            words = f"{left_count} folders of other models are not encrypted yet"
            self._health.troubles[TROUBLE] = words
        else:
            self._health.troubles.pop(TROUBLE, None)

    async def _encrypt_some(self) -> None:
        if self._current is None:
            self._name = self._waiting.pop(0)
            self._current = _encrypt_folder(self._config, self._name)
        current = self._current
        try:
            is_over = await self._workers.run(lambda: _advance(current))
        except (DiskError, FatalError) as error:
            self._failed.add(self._name)
            _log.error("cannot encrypt the folder %s: %s", self._name, error.message)
            is_over = True
        if is_over:
            self._current = None


def _advance(progress: Iterator[int]) -> bool:
    """Encrypt a part; return whether nothing is left."""
    done_bytes = 0
    for size_bytes in progress:
        done_bytes += size_bytes
        if done_bytes >= ENCRYPTION_STEP_BYTES:
            return False
    return True


def _encrypt_folder(config: NodeConfig, name: str) -> Iterator[int]:
    """Encrypt one folder, a file at each step; yield their bytes. Raise DiskError or FatalError."""
    path, durability = Path(config.data_dir).expanduser() / name, config.settings.durability
    disk = open_disk(path, durability, config.cluster_key, encrypts=True)
    try:
        disk.recover()  # what a crash left half-written is not encrypted either
        assert isinstance(disk, EncryptedDisk), "it was asked to encrypt"
        yield from disk.encrypt_files()
        _log.info("encrypted the folder %s", name)
    finally:
        disk.close()

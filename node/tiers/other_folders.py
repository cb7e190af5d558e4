"""Folders of models that are not served now: measured from time to time, removed when expired.

They are kept until their model is served again. If the disk is short of room, they go first.
"""

import logging

from fabric.limits import KIB
from fabric.ports import Clock
from node.limits import FOLDERS_EVERY_S
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.model_folders import ModelFolder, ModelFolders, folder_name
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
        """Remove one, unless another process uses it."""
        if await self._workers.run(lambda: self._folders.remove(folder)):
            self.found.remove(folder)

"""A node that takes no new agents, because somebody is about to close its lid.

Said durably, in a file beside the incarnation: a Mac is drained to be updated, moved or shut,
and what restarts meanwhile must not be given agents that would be cut off a moment later.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.control.node_calls import Done, DrainNode
from fabric.errors import FabricError
from node.limits import DRAIN_FLAG_BYTES_MAX
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.store.posix_disk import PosixDisk

FILE: Final = "draining"

_log = logging.getLogger(__name__)


def is_noted(folder: Path) -> bool:
    """Say whether the node whose data folder this is was draining when it was stopped."""
    disk = PosixDisk(folder)
    try:
        with contextlib.suppress(FileNotFoundError, FabricError):
            disk.read(FILE, DRAIN_FLAG_BYTES_MAX)
            return True
        return False
    finally:
        disk.close()


def _note(folder: Path, *, draining: bool) -> None:
    disk = PosixDisk(folder)
    try:
        if draining:
            disk.publish(FILE, [b"yes"])
        else:
            disk.remove(FILE)
    finally:
        disk.close()


@dataclass(frozen=True, slots=True)
class DrainFlag:
    """The drain flag of a node, stored in its data folder."""

    folder: Path
    workers: Workers
    health: Health

    async def recall(self) -> None:
        """Find out whether the node was draining when it was stopped."""
        self.health.is_draining = await self.workers.run(lambda: is_noted(self.folder))

    async def drain(self, call: DrainNode) -> Done:
        """Take no new agents, or take them again; raise DiskError where that is not durable."""
        if not call.draining:
            await self.workers.run(lambda: _note(self.folder, draining=False))
            self.health.is_draining = False
            return Done("takes new agents")
        self.health.is_draining = True
        try:
            await self.workers.run(lambda: _note(self.folder, draining=True))
        except FabricError as error:
            # A full disk is a good reason to drain: it must not be one not to.
            _log.error("draining is not durable: %s", error.message)
            return Done("takes no new agents until it is restarted: its disk refuses to note it")
        return Done("takes no new agents")

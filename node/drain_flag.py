"""Draining of a node, which then accepts no new agents.

Durable, in a file beside the incarnation: a Mac is drained before it is updated, moved or shut
down, and a restart in between must not attract new agents.
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
    """Return whether the node of this data folder was draining when it stopped."""
    disk = PosixDisk(folder)
    try:
        with contextlib.suppress(FileNotFoundError, FabricError):
            disk.read(FILE, DRAIN_FLAG_BYTES_MAX)
            return True
        return False
    finally:
        disk.close()


def _note(folder: Path, *, draining: bool) -> None:
    disk = PosixDisk(folder, must_exist=True)  # missing: its drive is unplugged
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
        """Restore the flag that the node's previous process stored."""
        self.health.is_draining = await self.workers.run(lambda: is_noted(self.folder))

    async def note(self) -> None:
        """Store the flag again in a recreated folder."""
        with contextlib.suppress(FabricError):
            await self.workers.run(lambda: _note(self.folder, draining=True))

    async def drain(self, call: DrainNode) -> Done:
        """Start or stop draining; raise DiskError if a stop cannot be stored."""
        if not call.draining:
            await self.workers.run(lambda: _note(self.folder, draining=False))
            self.health.is_draining = False
            return Done("takes new agents")
        self.health.is_draining = True
        try:
            await self.workers.run(lambda: _note(self.folder, draining=True))
        except FabricError as error:
            # A full disk is a reason to drain, so it must not prevent that.
            _log.error("the drain flag is not stored, so a restart ends it: %s", error.message)
            return Done("takes no new agents until it restarts: the disk cannot store the flag")
        return Done("takes no new agents")

"""A node that takes no new agents, because somebody is about to close its lid.

Said durably, in a file beside the incarnation: a Mac is drained to be updated, moved or shut,
and what restarts meanwhile must not be given agents that would be cut off a moment later.
"""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fabric.control.copy_calls import DrainNode
from fabric.control.node_calls import Done
from fabric.errors import FabricError
from node.store.posix_disk import PosixDisk

if TYPE_CHECKING:
    from node.node import Node

FILE: Final = "draining"
_BYTES_MAX: Final = 64

_log = logging.getLogger(__name__)


def is_noted(folder: Path) -> bool:
    """Say whether the node whose data folder this is was draining when it was stopped."""
    disk = PosixDisk(folder)
    try:
        with contextlib.suppress(FileNotFoundError, FabricError):
            disk.read(FILE, _BYTES_MAX)
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


async def drain(node: "Node", call: DrainNode) -> Done:
    """Take no new agents, or take them again; raise DiskError where the latter is not durable."""
    folder = node.config.data_dir
    if not call.draining:
        await node.in_worker(lambda: _note(folder, draining=False))
        node.is_draining = False
        return Done("takes new agents")
    node.is_draining = True
    try:
        await node.in_worker(lambda: _note(folder, draining=True))
    except FabricError as error:
        # A full disk is a good reason to drain: it must not be one not to.
        _log.error("draining is not durable: %s", error.message)
        return Done("takes no new agents until it is restarted: its disk refuses to note it")
    return Done("takes no new agents")

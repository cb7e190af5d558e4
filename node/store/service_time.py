"""Service time: seconds that a data folder has been served, which idle time is counted in.

The wall clock is not used: one that is a year ahead at boot would expire all agents at once. Agents
do not age while the node is off.

    DIR/<node>/served    seconds, and when each model's folder was last served
"""

import logging
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fabric.codec import pack, unpack
from fabric.errors import FabricError
from fabric.ids import NodeName
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from fabric.record.provenance import LastServed
from node.limits import SERVED_FILE_BYTES_MAX
from node.store.posix_disk import PosixDisk

FILE: Final = "served"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served:
    """The stored record of service time."""

    seconds: float
    folders: dict[str, float] = field(default_factory=dict)


class ServiceTime:
    """Seconds that a node has served its folder; without a folder they start at 0, unsaved."""

    def __init__(self, node: NodeName, clock: Clock, folder: Path | None = None) -> None:
        self._node = node
        self._clock = clock
        self._folder = folder
        served = self._load()
        self._before_s = max(0.0, served.seconds) - clock.monotonic_s()
        self._folders = served.folders

    @property
    def now_s(self) -> float:
        """Seconds that this folder has been served."""
        return self._before_s + self._clock.monotonic_s()

    def stamp(self) -> LastServed:
        """Return the time stamp for a turn that ends now."""
        return LastServed(self._node, int(self.now_s))

    def idle_s(self, record: Manifest) -> float:
        """Return the seconds since a stored record's last turn; 0 if this node cannot know."""
        served = record.provenance.served
        if served is None or served.node != self._node:
            return 0.0
        return max(0.0, self.now_s - served.seconds)

    def folder_s(self, name: str) -> float:
        """Return when a model's folder was last served; for an unknown folder, now."""
        return self._folders.setdefault(name, self.now_s)

    def note(self, served: str, others: set[str]) -> None:
        """Note that a folder is served; forget folders that no longer exist."""
        self._folders[served] = self.now_s
        self._folders = {n: s for n, s in self._folders.items() if n == served or n in others}

    def save(self) -> None:
        """Store the service time; if that fails, a restart loses the time since the last save."""
        if self._folder is None:
            return
        try:
            disk = PosixDisk(self._folder, must_exist=True)  # missing: its drive is unplugged
            with closing(disk):
                disk.publish(FILE, [pack(Served(self.now_s, dict(self._folders)))])
        except FabricError as error:
            _log.warning("cannot store how long agents have been idle: %s", error.message)

    def _load(self) -> Served:
        if self._folder is None:
            return Served(0.0)
        disk = PosixDisk(self._folder)
        try:
            return unpack(Served, disk.read(FILE, SERVED_FILE_BYTES_MAX))
        except FileNotFoundError:
            return Served(0.0)
        except FabricError as error:
            _log.warning("cannot read how long agents have been idle: %s", error.message)
            return Served(0.0)
        finally:
            disk.close()

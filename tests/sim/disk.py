"""A disk in memory with the atomic durable publish that posix_disk promises, and its faults.

A crash may leave the one publish that it interrupts done or not done, or any part of a removal.
Everything acknowledged stays.
"""

import errno
from contextlib import nullcontext
from dataclasses import dataclass, field

from fabric.errors import CorruptDataError
from fabric.ports import DriveSpace
from node.store.posix_disk import DiskError
from tests.sim.loop import PowerLostError
from tests.sim.workers import pause
from tests.support.opened_file import OpenedFile

FREE_BYTES = 1 << 40
STEP_S = 0.0004  # of a worker's time per access


@dataclass(eq=False)
class PointFault:
    """A single failing write: the `number`-th one to a file whose name begins with `prefix`."""

    number: int
    is_in_place: bool
    prefix: str = ""
    name: str | None = None  # of the file, once its write has failed


class Changes:
    """A counter of writes to any drive: while it stays the same no drive has changed."""

    count = 0


@dataclass(eq=False)
class SimDrive:
    """A drive, which survives processes: its files and its faults."""

    random: object
    files: dict = field(default_factory=dict)
    is_full: bool = False
    has_been_full: bool = False
    is_sticky: bool = False  # writes, but removes nothing
    error_odds: float = 0.0
    has_failed: bool = False
    crash_in: int | None = None  # writing calls until the power fails
    fault: PointFault | None = None
    slow_s: float = 0.0  # each access takes up to this much longer
    quarantined: int = 0
    damaged: set = field(default_factory=set)  # files damaged without the node's knowledge
    hurt: set = field(default_factory=set)  # files that were ever damaged so
    refused: set = field(default_factory=set)  # files that it has failed to write or remove

    def damage(self, only: str = "blocks/") -> str | None:
        """Corrupt, cut or delete one stored file without the node's knowledge."""
        names = sorted(name for name in self.files if name.startswith(only))
        if not names:
            return None
        name = self.random.choice(names)
        raw = self.files[name]
        at = self.random.randrange(len(raw))
        kind = self.random.randrange(5)
        if kind < 2:
            self.files[name] = raw[:at]
        elif kind < 4:
            self.files[name] = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        else:
            del self.files[name]
        self.damaged.add(name)
        self.hurt.add(name)
        return name

    def write(self, name, data):
        self.files[name] = data
        self.refused.discard(name)
        Changes.count += 1

    def drop(self, name):
        Changes.count += 1
        return self.files.pop(name, None)

    @property
    def is_well(self):
        is_faulty = self.fault is not None and self.fault.name is None
        return not (self.is_full or self.is_sticky or self.error_odds or is_faulty)


@dataclass(frozen=True)
class Lent:
    """What a block's file held when it was opened for sending."""

    payload: bytes

    @property
    def length(self):
        return len(self.payload)

    def read_into(self, view, offset):
        view[:] = self.payload[offset : offset + len(view)]

    def close(self):
        """Do nothing: no file is open."""


class SimDisk:
    """A process's view of a drive, below `root`; useless once that process is dead."""

    def __init__(self, drive, process, kill, root=""):
        self._drive = drive
        self._process = process
        self._kill = kill
        self._root = root

    def recover(self):
        return 0

    def close(self):
        pass

    def publish(self, name, parts):
        self._step()
        drive, name = self._require_power(), self._root + name
        data = b"".join(bytes(part) for part in parts)
        if self._is_last_call():
            if drive.random.random() < 0.5:
                drive.write(name, data)
            self._kill()
            raise PowerLostError
        if drive.is_full:
            raise self._refused([name], errno.ENOSPC)
        in_place = self._fails(name)
        if in_place is not None:
            if in_place:
                drive.write(name, data)
            # After a single failure the node can, and must, clean up the file.
            is_once = drive.fault is not None and drive.fault.name == name
            raise self._refused([] if is_once else [name], errno.EIO, in_place=in_place)
        drive.write(name, data)
        drive.damaged.discard(name)
        self._step()

    publish_ordered = publish

    def _fails(self, name):
        """Return None if this write succeeds, else whether its file is there all the same."""
        drive, fault = self._drive, self._drive.fault
        if fault is not None and fault.name is None and name.startswith(fault.prefix):
            fault.number -= 1
            if fault.number < 0:
                fault.name, drive.has_failed = name, True
                return fault.is_in_place
        if drive.random.random() < drive.error_odds:
            return drive.random.random() < 0.5
        return None

    def read(self, name, limit_bytes):
        self._step()
        raw = self._find(name)
        if len(raw) > limit_bytes:
            message = "over the limit"
            raise CorruptDataError(message)
        return raw

    def opened(self, name):
        self._find(name)
        return nullcontext(OpenedFile(self, name))

    def read_into(self, name, offset, buffers):
        self._step()
        raw, start = self._find(name), offset
        for buffer in buffers:
            data = raw[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            offset += len(data)
        return offset - start

    def lend(self, name, start, length):
        return Lent(self.read(name, start + length)[start:])

    def size_bytes(self, name):
        return len(self._find(name))

    def list_names(self, directory):
        lead = f"{self._root}{directory}/"
        names = [
            name.removeprefix(lead) for name in self._require_power().files if name.startswith(lead)
        ]
        return sorted(names)

    def remove(self, name):
        return self.remove_all([name]) == 1

    def remove_all(self, names):
        self._step()
        drive = self._require_power()
        names = sorted(self._root + name for name in names)
        if self._is_last_call():
            for name in names:
                if drive.random.random() < 0.5:
                    drive.drop(name)
            self._kill()
            raise PowerLostError
        if drive.is_sticky:
            raise self._refused(names, errno.EIO)
        if drive.random.random() < drive.error_odds:
            for name in names:
                if drive.random.random() < 0.3:
                    drive.drop(name)
            raise self._refused(names, errno.EIO)
        count = sum(drive.drop(name) is not None for name in names)
        drive.refused.difference_update(names)
        self._step()
        return count

    def quarantine(self, name, reason):
        self._step()
        drive = self._require_power()
        data = drive.drop(self._root + name)
        if data is not None:
            drive.quarantined += 1
            leaf = f"{drive.quarantined}.{name.rpartition('/')[2]}"
            drive.write(f"{self._root}quarantine/{leaf}", data)

    def remove_leftovers(self):
        return

    def drive(self):
        return DriveSpace(2 * FREE_BYTES, FREE_BYTES)

    def _find(self, name):
        files = self._require_power().files
        if self._root + name not in files:
            raise FileNotFoundError(name)
        return files[self._root + name]

    def _require_power(self):
        if self._process.is_dead:
            raise PowerLostError
        return self._drive

    def _step(self):
        """Pause a worker between two accesses for as long as the drive takes."""
        self._require_power()
        drive = self._drive
        pause(STEP_S + drive.slow_s * drive.random.random() if drive.slow_s else STEP_S)
        self._require_power()

    def _is_last_call(self):
        drive = self._drive
        if drive.crash_in is None:
            return False
        drive.crash_in -= 1
        if drive.crash_in > 0:
            return False
        drive.crash_in = None
        return True

    def _refused(self, names, cause, *, in_place=False):
        self._drive.refused.update(names)
        refusal = DiskError("the drive refused", cause)
        refusal.is_in_place = in_place
        return refusal

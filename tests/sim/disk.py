"""A disk in memory: atomic durable publish, as posix_disk promises it, and all that goes wrong.

What a crash may leave of the one call it interrupts: a publish that happened or did not, any
part of a removal. Everything acknowledged stays.
"""

import errno
from dataclasses import dataclass, field

from fabric.errors import CorruptDataError
from node.posix_disk import DiskError
from tests.sim.loop import PowerLostError

FREE_BYTES = 1 << 40


@dataclass(eq=False)
class Platter:
    """What survives the process: the files, and what ails the drive."""

    random: object
    files: dict = field(default_factory=dict)
    is_full: bool = False
    error_odds: float = 0.0
    has_failed: bool = False
    crash_in: int | None = None  # writing calls until the power fails
    quarantined: int = 0
    damaged: set = field(default_factory=set)  # names of files hurt behind the node's back

    def damage(self) -> str | None:
        """Flip or cut one stored block, behind the node's back."""
        names = sorted(name for name in self.files if name.startswith("blocks/"))
        if not names:
            return None
        name = self.random.choice(names)
        raw = self.files[name]
        at = self.random.randrange(len(raw))
        if self.random.random() < 0.5:
            self.files[name] = raw[:at]
        else:
            self.files[name] = raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
        self.damaged.add(name)
        return name


class SimDisk:
    """One process's view of a platter; useless once that process is dead."""

    def __init__(self, platter, process, kill):
        self._platter = platter
        self._process = process
        self._kill = kill

    def recover(self):
        return 0

    def publish(self, name, parts):
        platter = self._writable()
        data = b"".join(bytes(part) for part in parts)
        if self._is_last_call():
            if platter.random.random() < 0.5:
                platter.files[name] = data
            self._kill()
            raise PowerLostError
        if platter.is_full:
            raise _refusal(errno.ENOSPC)
        if platter.random.random() < platter.error_odds:
            failure = _refusal(errno.EIO)
            if platter.random.random() < 0.5:
                platter.files[name] = data
                failure.is_in_place = True
            raise failure
        platter.files[name] = data
        platter.damaged.discard(name)

    def read(self, name, limit_bytes):
        raw = self._find(name)
        if len(raw) > limit_bytes:
            message = "over the limit"
            raise CorruptDataError(message)
        return raw

    def read_into(self, name, offset, buffers):
        raw, start = self._find(name), offset
        for buffer in buffers:
            data = raw[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            offset += len(data)
        return offset - start

    def size_bytes(self, name):
        return len(self._find(name))

    def list_names(self, directory):
        lead = f"{directory}/"
        names = [name.removeprefix(lead) for name in self._alive().files if name.startswith(lead)]
        return sorted(names)

    def remove(self, name):
        return self.remove_all([name]) == 1

    def remove_all(self, names):
        platter = self._writable()
        names = sorted(names)
        if self._is_last_call():
            for name in names:
                if platter.random.random() < 0.5:
                    platter.files.pop(name, None)
            self._kill()
            raise PowerLostError
        if platter.random.random() < platter.error_odds:
            raise _refusal(errno.EIO)
        return sum(platter.files.pop(name, None) is not None for name in names)

    def quarantine(self, name, reason):
        platter = self._writable()
        if platter.files.pop(name, None) is not None:
            platter.quarantined += 1
            platter.files[f"quarantine/{platter.quarantined}.{name.rpartition('/')[2]}"] = b""

    def free_bytes(self):
        return FREE_BYTES

    def _find(self, name):
        files = self._alive().files
        if name not in files:
            raise FileNotFoundError(name)
        return files[name]

    def _alive(self):
        if self._process.is_dead:
            raise PowerLostError
        return self._platter

    _writable = _alive

    def _is_last_call(self):
        platter = self._platter
        if platter.crash_in is None:
            return False
        platter.crash_in -= 1
        if platter.crash_in > 0:
            return False
        platter.crash_in = None
        return True


def _refusal(cause):
    return DiskError("the drive refused", cause)

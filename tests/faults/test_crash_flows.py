"""Power fails anywhere in any flow: save, sweep, migrate in, erase, quarantine.

Every legal state of the disk must recover. The checker must also detect protocols that are broken
on purpose, as a checker that detects nothing proves nothing.
"""

import pytest

from node.store.posix_disk import PosixDisk
from tests.faults.crash_disk import SOUND, CrashDisk, Trace
from tests.faults.flows import LAST, problem_after_restart, take_steps
from tests.faults.traced_os import TracedOs

BAD_BYTE = b"\xa5"


def ignore_damage(_name: str) -> None:
    """Do nothing: files damaged before the power failure stay damaged."""


def problems(trace: Trace, *, first_only: bool = False) -> tuple[set[str], int]:
    """Recover from every crash state; return the problems and the number of distinct states."""
    found, seen = set(), set()
    for upto in range(len(trace.ops) + 1):
        acknowledged = trace.acknowledged(upto)
        for tree in trace.crash_states(upto):
            # Temporaries are removed unread, and empty folders are ignored.
            kept = (name for name in tree if "/" in name and "/.tmp-" not in name)
            files = {name: tree[name] for name in kept}
            key = (acknowledged, tuple(sorted(files.items())))
            if key in seen:
                continue
            seen.add(key)
            found |= {problem_of(files, acknowledged)} - {None}
            if found and first_only:
                return found, len(seen)
    return found, len(seen)


def problem_of(files: dict[str, bytes], acknowledged: int) -> str | None:
    return problem_after_restart(CrashDisk(files=dict(files)), acknowledged, ignore_damage)


def run_in_memory(disk: CrashDisk) -> Trace:
    def damage(name: str) -> None:
        raw = disk.files[name]
        disk.files[name] = raw[:-1] + BAD_BYTE
        disk.trace.overwrite(name, len(raw) - 1, BAD_BYTE)

    take_steps(disk, disk.trace.acknowledge, damage)
    return disk.trace


def run_for_real(monkeypatch, root, platform: str) -> Trace:
    PosixDisk(root).close()
    system = TracedOs(monkeypatch, root, platform)
    disk = PosixDisk(root, "full")

    def damage(name: str) -> None:
        path = root / name
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + BAD_BYTE)
        system.trace.overwrite(name, len(raw) - 1, BAD_BYTE)

    take_steps(disk, system.trace.acknowledge, damage)
    disk.close()
    return system.trace


class RecordsFirst(CrashDisk):
    """Broken protocol: blocks are published after the record that refers to them."""

    def __init__(self) -> None:
        super().__init__()
        self._late = []

    def publish_ordered(self, name: str, parts) -> None:
        if not name.startswith("blocks/"):
            super().publish_ordered(name, parts)
            return
        data = b"".join(bytes(part) for part in parts)
        self.files[name] = data
        self._late.append((name, data))

    def publish(self, name: str, parts) -> None:
        super().publish(name, parts)
        late, self._late = self._late, []
        for block in late:
            super().publish_ordered(block[0], [block[1]])


class BlocksRemovedFirst(CrashDisk):
    """Broken protocol: a record is removed after its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self._late = []

    def remove_all(self, names) -> int:
        if names and names[0].startswith("manifests/"):
            self._late += names
            return len(names)
        late, self._late = self._late, []
        return super().remove_all(names) + super().remove_all(late)


def disk_without(*steps: str) -> CrashDisk:
    return CrashDisk(tuple(step for step in SOUND if step not in steps))


BROKEN = {
    "file not flushed before the rename": lambda: disk_without("flush"),
    "directory never flushed": lambda: disk_without("flush directory"),
    "nothing flushed": lambda: disk_without("flush", "flush directory"),
    "written in place": lambda: disk_without("rename"),
    "flushed after the rename": lambda: CrashDisk(
        ("create", "write", "rename", "flush", "flush directory")
    ),
    "records before their blocks": RecordsFirst,
    "blocks removed before their record": BlocksRemovedFirst,
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_protocol_is_detected(name):
    found, _ = problems(run_in_memory(BROKEN[name]()), first_only=True)
    assert found != set()


def test_every_crash_state_recovers():
    trace = run_in_memory(CrashDisk())
    assert trace.acknowledged(len(trace.ops)) == LAST
    found, count = problems(trace)
    assert found == set()
    assert count > 60


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_every_crash_state_of_the_posix_disk_recovers(monkeypatch, tmp_path, platform):
    trace = run_for_real(monkeypatch, tmp_path / "root", platform)
    assert trace.acknowledged(len(trace.ops)) == LAST
    found, count = problems(trace)
    assert found == set()
    assert count > 60

"""Power fails anywhere: every legal state of the disk must recover.

The checker must also detect each broken protocol, as one that detects nothing proves nothing.
"""

import itertools

import pytest

from node.store import posix_disk
from node.store.posix_disk import PosixDisk
from tests.faults.crash_disk import SOUND, CrashDisk, Trace
from tests.faults.traced_os import Killed, TracedOs
from tests.faults.turns import HISTORY, SOUND_ORDER, problem_after_restart, take_turns


def problems(trace: Trace, first: int = 0, *, stop: bool = True) -> tuple[set[str], int]:
    """Recover from every crash state; return the problems and the number of states.

    With `stop`, end at the first crash point with a problem.
    """
    found, seen, count = set(), set(), 0
    for upto in range(first, len(trace.ops) + 1):
        if found and stop:
            break
        acknowledged = trace.acknowledged(upto)
        for tree in trace.crash_states(upto):
            count += 1
            # Temporaries are removed unread: their contents make no difference.
            files = {name: data for name, data in tree.items() if "/.tmp-" not in name}
            key = (acknowledged, tuple(sorted(files.items())))
            if key not in seen:
                seen.add(key)
                problem = problem_after_restart(CrashDisk(files=files), acknowledged)
                found |= {problem} - {None}
    return found, count


def run_in_memory(steps=SOUND, order=SOUND_ORDER) -> Trace:
    disk = CrashDisk(steps)
    take_turns(disk, disk.trace.acknowledge, order)
    return disk.trace


def test_sound_protocol_survives_every_crash_state():
    found, count = problems(run_in_memory())
    assert found == set()
    assert count > 100


BROKEN_STEPS = {
    "written in place": ("create", "write", "flush", "flush directory"),
    "no flush at all": ("create", "write", "rename"),
    "file never flushed": ("create", "write", "rename", "flush directory"),
    "directory never flushed": ("create", "write", "flush", "rename"),
    "flushed after the rename": ("create", "write", "rename", "flush", "flush directory"),
    "directory flushed too early": ("create", "write", "flush", "flush directory", "rename"),
    "flushed before the write": ("create", "flush", "write", "rename", "flush directory"),
}


@pytest.mark.parametrize("name", BROKEN_STEPS)
def test_broken_publish_is_detected(name):
    found, _ = problems(run_in_memory(BROKEN_STEPS[name]))
    assert found != set()


BROKEN_ORDERS = {
    "record before its blocks": ("record", "blocks", "acknowledge", "sweep"),
    "acknowledged before the record": ("blocks", "acknowledge", "record", "sweep"),
    "old blocks removed first": ("sweep", "blocks", "record", "acknowledge"),
}


@pytest.mark.parametrize("name", BROKEN_ORDERS)
def test_broken_order_is_detected(name):
    found, _ = problems(run_in_memory(order=BROKEN_ORDERS[name]))
    assert found != set()


@pytest.mark.parametrize(
    ("steps", "cost"),
    [
        ("file never flushed", "torn record"),
        ("directory never flushed", "revision 0 although 1 was acknowledged"),
        ("written in place", "torn record"),
    ],
)
def test_broken_publish_causes_its_known_failure(steps, cost):
    assert cost in problems(run_in_memory(BROKEN_STEPS[steps]), stop=False)[0]


def test_drive_cache_that_is_never_flushed_is_detected():
    disk = CrashDisk(empties_cache=False)
    take_turns(disk, disk.trace.acknowledge)
    assert "revision 0 although 1 was acknowledged" in problems(disk.trace, stop=False)[0]


@pytest.fixture(params=["linux", "darwin"])
def traced(request, monkeypatch, tmp_path):
    root = tmp_path / "root"
    PosixDisk(root).close()
    return TracedOs(monkeypatch, root, request.param), root


def test_posix_disk_survives_every_crash_state(traced):
    system, root = traced
    disk = PosixDisk(root, "full")
    take_turns(disk, system.trace.acknowledge)
    disk.close()

    found, count = problems(system.trace)

    assert found == set()
    assert count > 100
    assert len(system.trace.ops) > 40


@pytest.mark.parametrize("skipped", ["file", "directory", "both"])
def test_posix_disk_without_a_flush_is_detected(traced, monkeypatch, skipped):
    system, root = traced
    flush = posix_disk.flush

    def partial(descriptor, durability):
        is_directory = isinstance(system._open.get(descriptor), str)
        if skipped not in ("both", "directory" if is_directory else "file"):
            flush(descriptor, durability)

    monkeypatch.setattr(posix_disk, "flush", partial)
    disk = PosixDisk(root, "full")
    take_turns(disk, system.trace.acknowledge)
    disk.close()

    found, _ = problems(system.trace)

    assert found != set()


@pytest.mark.parametrize(
    ("traced", "durability"), [("linux", "none"), ("darwin", "barrier")], indirect=["traced"]
)
def test_lower_durability_does_not_survive_power_loss(traced, durability):
    system, root = traced
    disk = PosixDisk(root, durability)
    take_turns(disk, system.trace.acknowledge)
    disk.close()
    assert problems(system.trace)[0] != set()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_kill_restart_and_power_loss_are_survived(monkeypatch, tmp_path, platform):
    """The next process must flush a killed process's writes before it builds on them."""
    states = 0
    for point in itertools.count():
        with monkeypatch.context() as patch:
            root = tmp_path / str(point)
            PosixDisk(root).close()
            system = TracedOs(patch, root, platform)
            disk, was_killed = PosixDisk(root, "full"), False
            system.die_after = point
            try:
                take_turns(disk, system.trace.acknowledge)
            except Killed:
                was_killed = True
            system.die_after = None
            disk.close()
            killed_at = len(system.trace.ops)
            disk = PosixDisk(root, "full")
            take_turns(disk, system.trace.acknowledge)
            disk.close()
        found, count = problems(system.trace, killed_at)
        assert found == set(), f"killed before operation {point}"
        states += count
        if not was_killed:
            break
    assert point > 40
    assert states > 400
    assert system.trace.acknowledged(len(system.trace.ops)) == len(HISTORY)

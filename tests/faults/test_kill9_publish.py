"""SIGKILL a real process before every disk operation of three turns, and inside every write.

Run as a script, this file is the process that forks the victims: one per operation, so that
neither pytest nor its libraries are in the processes that die.
"""

import json
import os
import signal
import subprocess
import sys
import traceback
from itertools import count
from pathlib import Path

import pytest

from node.posix_disk import PosixDisk
from tests.faults.turns import HISTORY, problem_after_restart, take_turns

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATIONS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "close", "stat", "readv")


def arm(point: int, *, torn: bool) -> None:
    """Make operation number `point` of this process its last; if torn, half of it happens."""
    numbers = count()
    for name in OPERATIONS:
        call = getattr(os, name)

        def counted(*args, _call=call, _name=name, **kwargs):
            if next(numbers) == point:
                if torn and _name == "writev":
                    whole = b"".join(bytes(view) for view in args[1])
                    os.write(args[0], whole[: len(whole) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # The page cache outlives a process, so flushing it would only take time.
            return None if _name == "fsync" else _call(*args, **kwargs)

        setattr(os, name, counted)


def die_at(point: int, root: Path, *, torn: bool) -> bool:
    """Fork a process that takes its turns until it dies; return whether it did."""
    acknowledgements = os.open(f"{root}.acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    victim = os.fork()
    if victim == 0:
        arm(point, torn=torn)
        try:
            disk = PosixDisk(root, "full")
            take_turns(disk, lambda revision: os.write(acknowledgements, b"%d\n" % revision))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not return
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(victim, 0)
    os.close(acknowledgements)
    assert status in (0, signal.SIGKILL), "a victim dies by our hand or finishes its turns"
    return os.WIFSIGNALED(status)


def main(folder: str) -> None:
    points = {}
    for kind in ("whole", "torn"):
        point = 0
        while die_at(point, Path(folder) / f"{kind}-{point}", torn=kind == "torn"):
            point += 1
        points[kind] = point
    print(json.dumps(points))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the roots that the victims left, in the order of their deaths."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    points = json.loads(done.stdout)
    assert min(points.values()) > 60
    return [folder / f"{kind}-{point}" for kind in points for point in range(points[kind])]


def acknowledged(root: Path) -> int:
    return max(map(int, Path(f"{root}.acknowledged").read_text().split()), default=0)


def test_every_death_leaves_the_old_state_or_the_new(killed):
    found = {}
    for root in killed:
        disk = PosixDisk(root, "none")
        problem = problem_after_restart(disk, acknowledged(root))
        if problem is None:
            take_turns(disk, lambda _revision: None)  # and the agent lives on
            problem = problem_after_restart(disk, len(HISTORY))
        disk.close()
        left = [path.name for path in root.rglob(".tmp-*")]
        if problem or left or (root / "quarantine").exists():
            found[root.name] = (problem, left)

    assert found == {}
    # Nothing is left to remove after the third, so nobody dies having acknowledged it.
    assert {acknowledged(root) for root in killed} == {0, 1, 2}


if __name__ == "__main__":
    main(sys.argv[1])

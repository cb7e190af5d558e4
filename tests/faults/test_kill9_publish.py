"""SIGKILL a real process before every disk operation of three turns, and inside every write.

Run as a script, this file is the process that forks the victims: one per operation, so that
neither pytest nor its libraries are in the processes that die.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from node.store.posix_disk import PosixDisk
from tests.faults.sigkill import die_at
from tests.faults.turns import HISTORY, problem_after_restart, take_turns

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATIONS = ("open", "mkdir", "writev", "fsync", "rename", "unlink", "close", "stat", "readv")


def main(folder: str) -> None:
    points = {}
    for kind in ("whole", "torn"):
        point = 0
        root = Path(folder)
        while die_at(point, root / f"{kind}-{point}", OPERATIONS, take_turns, torn=kind == "torn"):
            point += 1
        points[kind] = point
    print(json.dumps(points))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Return the victims' folders in the order of their deaths."""
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


def test_every_kill_leaves_the_old_or_the_new_state(killed):
    found = {}
    for root in killed:
        disk = PosixDisk(root, "none")
        problem = problem_after_restart(disk, acknowledged(root))
        if problem is None:
            take_turns(disk, lambda _revision: None)  # and the agent continues
            problem = problem_after_restart(disk, len(HISTORY))
        disk.close()
        temporaries = [path.name for path in root.rglob(".tmp-*")]
        if problem or temporaries or (root / "quarantine").exists():
            found[root.name] = (problem, temporaries)

    assert found == {}
    # The third turn removes nothing after its acknowledgement, so no victim dies after that.
    assert {acknowledged(root) for root in killed} == {0, 1, 2}


if __name__ == "__main__":
    main(sys.argv[1])

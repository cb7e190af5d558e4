"""SIGKILL a real process before every disk operation of every flow, and inside every write.

The default run tries a sample of the operations; `pytest -m nightly` tries all of them. Run as
a script, this file forks the victims, as test_kill9_publish.py does.
"""

import json
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from node.store.posix_disk import PosixDisk
from tests.faults.flows import A1, LAST, World, problem_after_restart, record_name, take_steps
from tests.faults.sigkill import die_at

REPOSITORY = Path(__file__).resolve().parents[2]
OPERATIONS = (
    "open", "mkdir", "writev", "fsync", "rename", "unlink", "close", "stat", "fstat", "readv",
    "lseek",
)  # fmt: skip
SAMPLE = 17  # interval of the sampled operations; a prime, so that every kind is sampled


def damage_under(root: Path):
    """Return a function that flips a byte of a file once, bypassing the disk."""

    def damage(name: str) -> None:
        path = root / name
        if not path.exists():
            return
        raw = bytearray(path.read_bytes())
        raw[-1] = 0xA5
        path.write_bytes(raw)

    return damage


def main(folder: str, step: int) -> None:
    points = {}
    for offset, kind in enumerate(("whole", "torn")):
        tried = []
        for point in count(offset, step):
            tried.append(f"{kind}-{point}")
            root = Path(folder) / tried[-1]
            damage = damage_under(root)
            take = lambda disk, acknowledge, damage=damage: take_steps(disk, acknowledge, damage)  # noqa: E731
            if not die_at(point, root, OPERATIONS, take, torn=kind == "torn"):
                break
        points[kind] = tried
    print(json.dumps(points))


def acknowledged(root: Path) -> int:
    return max(map(int, Path(f"{root}.acknowledged").read_text().split()), default=0)


def check_all(folder: Path, step: int) -> int:
    """Kill at every `step`-th operation; check the files of each victim; return their number."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(step)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=1_200,
    )
    roots = [folder / name for names in json.loads(done.stdout).values() for name in names]
    found, promised = {}, set()
    for root in roots:
        disk, damage = PosixDisk(root, "none"), damage_under(root)
        last = acknowledged(root)
        problem = problem_after_restart(disk, last, damage)
        if problem is None:
            take_steps(disk, lambda _step: None, damage)  # and the node continues
            problem = problem_after_restart(disk, LAST, damage)
        disk.close()
        temporaries = [path.name for path in root.rglob(".tmp-*")]
        if problem or temporaries:
            found[root.name] = (problem, temporaries)
        promised.add(last)
    assert found == {}
    assert len(promised) >= (LAST + 1 if step == 1 else LAST - 2)
    return len(roots)


def test_sampled_kills_leave_the_old_or_the_new_state(tmp_path):
    assert check_all(tmp_path, SAMPLE) > LAST


@pytest.mark.nightly
def test_every_kill_leaves_the_old_or_the_new_state(tmp_path):
    assert check_all(tmp_path, 1) > 500


def test_checker_detects_broken_disks(tmp_path):
    """Each fault produces a disk that no correct node leaves."""
    faults = {
        "a record lacks a block": lambda root: next(root.glob("blocks/*.state")).unlink(),
        "although": lambda root: next(root.glob("manifests/*")).unlink(),
        "mixed": lambda root: (root / record_name(A1)).unlink(),
    }
    for words, spoil in faults.items():
        root = tmp_path / words.split()[-1]
        disk = PosixDisk(root, "none")
        world = World(disk, damage_under(root))
        for take in world.steps()[: 5 if words == "mixed" else 2]:
            take()
        disk.close()
        spoil(root)
        disk = PosixDisk(root, "none")
        problem = problem_after_restart(disk, 4 if words == "mixed" else 1, damage_under(root))
        disk.close()
        assert words in (problem or ""), words


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

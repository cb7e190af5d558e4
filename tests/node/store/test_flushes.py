"""The number of full flushes per turn on macOS; each takes a Mac's drive up to 18 ms."""

import fcntl
from collections import Counter
from functools import partial

import pytest

from fabric.hosting import disk_flush
from node.store import posix_disk
from node.store.posix_disk import PosixDisk
from tests.support.agent_traffic import words
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

FULL_FLUSHES_MAX = 2  # of an acknowledged turn
NAMES = {disk_flush.BARRIER: "barrier", disk_flush.FULL_FLUSH: "full"}


@pytest.fixture
def flushes(monkeypatch):
    """Count the flush commands that would be sent on macOS."""
    counts, call = Counter(), fcntl.fcntl

    def count_and_call(descriptor, command, *arguments):
        if command not in NAMES:
            return call(descriptor, command, *arguments)
        counts[NAMES[command]] += 1
        return 0

    monkeypatch.setattr(fcntl, "fcntl", count_and_call)
    flush = partial(disk_flush.flush, platform="darwin")
    monkeypatch.setattr(posix_disk, "flush", flush)
    return counts


def test_two_blocks_and_their_record_take_one_full_flush(tmp_path, flushes):
    disk = PosixDisk(tmp_path / "node")
    disk.publish("manifests/first.mf", [b"x"])
    disk.publish_ordered("blocks/first.full", [b"x"])
    flushes.clear()
    disk.publish_ordered("blocks/b.full", [b"x"])
    disk.publish_ordered("blocks/c.window", [b"x"])
    disk.publish("manifests/m.mf", [b"x"])
    assert flushes == {"barrier": 5, "full": 1}
    flushes.clear()
    assert disk.remove_all(["blocks/b.full", "manifests/m.mf"]) == 2
    assert flushes == {"barrier": 1, "full": 1}
    disk.close()


@pytest.mark.parametrize(("durability", "expected"), [("barrier", "barrier"), ("none", None)])
def test_lower_durability_takes_no_full_flush(tmp_path, flushes, durability, expected):
    disk = PosixDisk(tmp_path / "node", durability)
    disk.publish_ordered("blocks/b.full", [b"x"])
    disk.publish("manifests/m.mf", [b"x"])
    disk.remove("manifests/m.mf")
    disk.close()
    assert set(flushes) == ({expected} if expected else set())


def test_acknowledged_turn_takes_at_most_two_full_flushes(tmp_path, flushes):
    model = str(write_model(tmp_path / "model", ONE_LAYER))
    messages, taken = [{"role": "user", "content": words(1, 80)}], []
    with running(tmp_path / "disk", model, durability="full") as service:
        for number in range(4):
            flushes.clear()
            reply = ask(service, messages, agent="a")
            taken.append(flushes["full"])
            assert flushes["barrier"] > flushes["full"] > 0, "its record is on the drive"
            messages += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": words(10 + number, 60)},
            ]
    assert max(taken) <= FULL_FLUSHES_MAX, taken

"""Seconds of service across restarts, without a calendar, and 0 when unknown."""

from dataclasses import replace

import pytest

from fabric.codec import pack
from fabric.record.provenance import Provenance
from node.store.posix_disk import PosixDisk
from node.store.service_time import FILE, Served, ServiceTime
from tests.support.blocks import make_manifest

RECORD = make_manifest([])


def record_with_notes(notes):
    return replace(RECORD, provenance=Provenance.from_wire(notes))


class Clock:
    def __init__(self, now_s):
        self.now_s = now_s

    def monotonic_s(self):
        return self.now_s


def test_service_seconds_are_counted_across_restarts(tmp_path):
    clock = Clock(1_000.0)
    first = ServiceTime("node-a", clock, tmp_path)
    clock.now_s += 50.0
    record = replace(RECORD, provenance=Provenance(served=first.stamp()))
    first.note("a" * 16, set())
    clock.now_s += 50.0
    first.save()
    again = ServiceTime("node-a", Clock(7.0), tmp_path)
    assert again.now_s == 100.0
    assert again.idle_s(record) == 50.0
    assert again.folder_s("a" * 16) == 50.0
    assert again.folder_s("b" * 16) == 100.0, "met for the first time"


@pytest.mark.parametrize(
    "stamp", ["", "node-b:5", "node-a:", "node-a:-5", "node-a:x", "node-a:9" * 9]
)
def test_invalid_stamps_mean_no_idle_time(tmp_path, stamp):
    disk = PosixDisk(tmp_path)
    disk.publish(FILE, [pack(Served(1e6))])
    disk.close()
    time = ServiceTime("node-a", Clock(0.0), tmp_path)
    assert time.idle_s(record_with_notes({"served": stamp})) == 0.0


def test_damaged_count_restarts_at_zero(tmp_path):
    ServiceTime("node-a", Clock(0.0), tmp_path).save()
    (tmp_path / FILE).write_bytes(b"\xff" * 100)
    time = ServiceTime("node-a", Clock(0.0), tmp_path)
    assert time.now_s == 0.0
    assert time.idle_s(record_with_notes({"served": "node-a:500"})) == 0.0

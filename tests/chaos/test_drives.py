"""A drive filled by a chaos run refuses writes as a real one does, and accepts them afterwards."""

import errno

import pytest

from node.store.posix_disk import DiskError, PosixDisk
from tests.chaos.drives import bounded_drives

NAMES = ("node-a", "node-b")
BLOCK = b"x" * (1 << 20)


def test_full_drive_rejects_writes_and_keeps_its_files(tmp_path):
    nodes = tmp_path / "nodes"
    with bounded_drives(nodes, NAMES) as drives:
        if drives is None:
            pytest.skip("mounting a drive takes root on Linux")
        disks = {name: PosixDisk(nodes / name, "none") for name in NAMES}
        disks["node-a"].publish("blocks/before", [BLOCK])
        with drives.filled("node-a", 0):
            with pytest.raises(DiskError) as error:
                disks["node-a"].publish("blocks/during", [BLOCK])
            assert error.value.cause == errno.ENOSPC
            disks["node-b"].publish("blocks/during", [BLOCK])
            assert disks["node-a"].read("blocks/before", len(BLOCK)) == BLOCK
        disks["node-a"].publish("blocks/after", [BLOCK])
        for disk in disks.values():
            disk.close()
    kept = (tmp_path / "kept" / "node-a" / "blocks").iterdir()
    assert sorted(path.name for path in kept) == ["after", "before"]
    assert not (nodes / "node-a").is_mount()

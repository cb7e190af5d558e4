"""A disk's refusal keeps no object alive."""

import errno
import gc
import weakref
from contextlib import suppress

from node.store.posix_disk import DiskError, PosixDisk


def test_refused_publish_keeps_no_reference_to_its_caller(tmp_path, monkeypatch):
    """The refused data may be a conversation's memory, and garbage collections are rare."""

    class Memory:
        pass

    def save(memory):
        alive.append(weakref.ref(memory))
        disk.publish("blocks/a", [b"x"])

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space left")

    alive, disk = [], PosixDisk(tmp_path / "root", "none")
    monkeypatch.setattr("node.store.posix_disk.write_all", fail)
    gc.disable()
    try:
        with suppress(DiskError):
            save(Memory())
        assert alive[0]() is None
    finally:
        gc.enable()
        disk.close()

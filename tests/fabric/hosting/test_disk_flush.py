import errno
import fcntl
import os
import sys

import pytest

from fabric.hosting import disk_flush


@pytest.mark.parametrize(
    ("durability", "refused", "expected"),
    [
        ("full", {}, [disk_flush.FULL_FLUSH]),
        ("barrier", {}, [disk_flush.BARRIER]),
        ("barrier", {disk_flush.BARRIER: errno.ENOTSUP}, [85, 51]),
        ("full", {disk_flush.FULL_FLUSH: errno.ENOTSUP}, [51, "fsync"]),
        ("barrier", {85: errno.EINVAL, 51: errno.ENOTTY}, [85, 51, "fsync"]),
        ("full", {disk_flush.FULL_FLUSH: errno.EIO}, [51, "EIO"]),
        ("none", {}, []),
    ],
)
def test_flush_commands_on_macos(monkeypatch, durability, refused, expected):
    """Check the commands sent on macOS; only a Mac can show that they reach the drive."""
    done = []

    def command(_descriptor, number):
        done.append(number)
        if number in refused:
            raise OSError(refused[number], "refused")

    monkeypatch.setattr(fcntl, "fcntl", command)
    monkeypatch.setattr(os, "fsync", lambda _descriptor: done.append("fsync"))
    try:
        disk_flush.flush(0, durability, "darwin")
    except OSError as error:
        done.append(errno.errorcode[error.errno])
    assert done == expected


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS: F_FULLFSYNC")
def test_flush_commands_have_their_macos_values():
    assert fcntl.F_FULLFSYNC == disk_flush.FULL_FLUSH
    assert getattr(fcntl, "F_BARRIERFSYNC", 85) == disk_flush.BARRIER

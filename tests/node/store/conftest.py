"""An empty store of blocks on a disk of its own."""

import pytest

from node.store.block_store import BlockStore
from node.store.posix_disk import PosixDisk
from tests.support.blocks import FINGERPRINT, SPEC


@pytest.fixture
def disk(tmp_path):
    disk = PosixDisk(tmp_path / "root", "none")
    yield disk
    disk.close()


@pytest.fixture
def store(disk):
    return BlockStore(disk, SPEC, FINGERPRINT)

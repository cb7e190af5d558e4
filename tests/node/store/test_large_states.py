"""States and blocks of hundreds of megabytes: stored, checked and read like any others."""

import numpy as np
import pytest

from fabric.errors import CorruptDataError
from fabric.kvcache.cache_spec import CacheGroup, LayerKind, LayerSpec, ModelCacheSpec, TensorSpec
from fabric.limits import BLOCK_BYTES_MAX, BLOCK_TOKENS, MIB
from node.store import posix_disk
from node.store.block_files import BlockFiles
from node.store.posix_disk import PosixDisk
from node.store.staging import PORTION_BYTES
from tests.support.blocks import FINGERPRINT

# Falcon-H1-34B's: 72 layers of 32 x 128 x 256 numbers of 32 bits.
STATE = TensorSpec("state.0", "F32", (1, 32, 128, 256))
SPEC = ModelCacheSpec(tuple(LayerSpec(LayerKind.RECURRENT, states=(STATE,)) for _ in range(72)))
TOKENS = list(range(7))
PARENT, NAME = b"p" * 32, b"n" * 32


def test_blocks_and_states_of_real_models_fit_the_limit() -> None:
    """Shapes looked up: per 256 tokens, or per state."""
    deepseek_v2_236b = 60 * 128 * BLOCK_TOKENS * (192 + 128) // 2 * 9 // 8
    nemotron_h_56b = 54 * 256 * 64 * 256 * 4
    assert 256 * MIB < deepseek_v2_236b < BLOCK_BYTES_MAX
    assert 256 * MIB < nemotron_h_56b < BLOCK_BYTES_MAX


@pytest.mark.slow
def test_large_state_is_stored_verified_and_read(tmp_path, monkeypatch) -> None:
    """Every byte, through a small buffer; and one wrong bit is found by either way of reading."""
    size = SPEC.kv_bytes(0, CacheGroup.STATE)
    assert size == 288 * MIB
    state = np.arange(size // 4, dtype=np.uint32).view(np.uint8)
    disk = PosixDisk(tmp_path, "none")
    files = BlockFiles(disk, SPEC, FINGERPRINT)
    ref = files.make_ref(NAME, TOKENS, [state.data], CacheGroup.STATE)
    tokens = np.array(TOKENS, np.uint32).view(np.uint8).data
    files.write(ref, PARENT, [state.data, tokens])
    largest = []
    read_all = posix_disk.read_all

    def record_and_read(descriptor, buffers):
        largest.append(sum(buffer.nbytes for buffer in buffers))
        return read_all(descriptor, buffers)

    monkeypatch.setattr(posix_disk, "read_all", record_and_read)
    files.verify(ref)
    assert max(largest) <= PORTION_BYTES
    out = np.zeros(size, np.uint8)
    files.read(ref, PARENT, TOKENS, [out.data])
    assert np.array_equal(out, state)

    path = next((tmp_path / "blocks").iterdir())
    with path.open("r+b") as file:
        file.seek(-200 * MIB, 2)
        byte = file.read(1)[0]
        file.seek(-200 * MIB, 2)
        file.write(bytes([byte ^ 1]))
    for check in (lambda: files.verify(ref), lambda: files.read(ref, PARENT, TOKENS, [out.data])):
        with pytest.raises(CorruptDataError, match="checksum"):
            check()
    disk.close()

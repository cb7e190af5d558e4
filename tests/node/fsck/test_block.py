"""A block of any length is checked in pieces."""

import tracemalloc

import pytest

from fabric.errors import CorruptDataError
from fabric.kvcache.cache_spec import TensorSpec
from fabric.kvcache.hashing import payload_checksum
from fabric.kvcache.safetensors_header import render_header
from fabric.limits import MIB
from node.fsck import block as fsck_block
from node.fsck.block import PIECE_BYTES, BlockCheck
from node.store.block_store import BlockStore
from node.store.encrypted_disk import open_disk
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, SALT, SPEC, make_block

HASH = b"h" * 32


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def disk(request, tmp_path):
    opened = open_disk(tmp_path, "none", CLUSTER_KEY, encrypts=request.param)
    yield opened
    opened.close()


def put_long(disk, kv_bytes, tokens_count=256):
    """Store a block without a model; return its leaf."""
    tensors = [
        TensorSpec("layers.0.keys.codes", "U32", (kv_bytes // 4,)),
        TensorSpec("tokens", "U32", (tokens_count,)),
    ]
    metadata = {"format": "macfabric-block", "version": "1", "group": "full"}
    metadata |= {"fingerprint": FINGERPRINT.hex(), "parent": HASH.hex(), "block_hash": HASH.hex()}
    payload = bytes(kv_bytes) + bytes(range(256)) * (tokens_count // 64)
    leaf = f"{HASH.hex()}-{payload_checksum([payload]).hex()}.full"
    disk.publish(f"blocks/{leaf}", [render_header(tensors, metadata), payload])
    return leaf, len(payload)


@pytest.mark.parametrize("kv_bytes", [4, PIECE_BYTES - 1_024, PIECE_BYTES - 4, 40 * MIB])
def test_memory_of_the_check_does_not_grow_with_the_block(disk, kv_bytes):
    leaf, payload_bytes = put_long(disk, kv_bytes)
    check = BlockCheck(disk, FINGERPRINT.hex()[:16], None)
    tracemalloc.start()
    try:
        found = check.check(leaf, None)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (found.block_hash, found.payload_bytes, found.tokens_count) == (HASH, payload_bytes, 256)
    assert peak_bytes < 16 * MIB
    with pytest.raises(CorruptDataError, match="name does not match its contents"):
        check.check(leaf, SALT)


@pytest.mark.parametrize("piece_bytes", [1, 3, 100, 1 << 20])
def test_tokens_are_read_across_piece_boundaries(disk, monkeypatch, piece_bytes):
    monkeypatch.setattr(fsck_block, "PIECE_BYTES", piece_bytes)
    block = make_block(1, 40, SPEC)
    block.put_into(BlockStore(disk, SPEC, FINGERPRINT))
    check = BlockCheck(disk, FINGERPRINT.hex()[:16], None)
    assert check.check(f"{block.ref.name}.full", SALT) == block.ref

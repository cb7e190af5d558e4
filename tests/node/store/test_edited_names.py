"""Edited rows are never found for an unedited prompt of the same tokens, or vice versa."""

import random
from dataclasses import replace

import pytest

from fabric.kvcache.block_chain import UNEDITED, EditLineage, block_spans
from fabric.limits import BLOCK_TOKENS
from fabric.record.layout import unedited_layout
from fabric.record.piece_table import PieceTable
from fabric.u32s import U32s
from node.fsck.block import BlockCheck
from node.mlx.resident_cache import ResidentCache
from node.store.agent_store import AgentStore
from node.store.block_files import file_name
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.tiers.restore import load_layout
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, SALT, SPEC, TENANT, make_manifest

EDITED = EditLineage(BLOCK_TOKENS, b"e" * 32)  # after the first block
TOKENS = random.Random(0).choices(range(1 << 16), k=3 * BLOCK_TOKENS)


@pytest.fixture
def store(disk):
    blocks = BlockStore(disk, SPEC, FINGERPRINT)
    return AgentStore(blocks, ManifestStore(disk, CLUSTER_KEY), CLUSTER_KEY, FINGERPRINT, SPEC)


def save(store, lineage):
    """Store random blocks under the names of a history of edits."""
    kv = memoryview(random.Random(lineage.start).randbytes(SPEC.kv_bytes(BLOCK_TOKENS)))
    spans = block_spans(SALT, FINGERPRINT, TOKENS, lineage=lineage)
    return [store.save_block(span, TOKENS, kv) for span in spans]


def test_prefix_index_excludes_edited_blocks(store):
    refs = save(store, EDITED)
    assert refs
    assert not store.shared_prefix(TENANT, TOKENS).blocks


def test_names_after_an_edit_match_no_unedited_block(store):
    refs = save(store, UNEDITED)
    spans = block_spans(SALT, FINGERPRINT, TOKENS, lineage=EDITED)
    assert [store.blocks.find(span.block_hash) for span in spans] == [None, None]
    assert store.shared_prefix(TENANT, TOKENS).blocks == refs


def test_edited_blocks_are_not_loaded_into_an_unedited_cache(store):
    """Even where a table names them."""
    refs = [save(store, UNEDITED)[0], *save(store, EDITED)]
    pieces, ids = PieceTable().append(refs), U32s(TOKENS)
    record = replace(make_manifest([]), token_ids=ids, pieces=pieces)
    cache = ResidentCache(SPEC, len(TOKENS))
    found = load_layout(store, TENANT, TOKENS, unedited_layout(record), cache)
    assert found.tokens_count == cache.tokens_count == BLOCK_TOKENS


def test_names_after_an_edit_pass_the_offline_check(store, disk):
    """The names follow from the file contents alone, as the check ignores edits."""
    check = BlockCheck(disk, FINGERPRINT.hex()[:16], None)
    for ref in save(store, EDITED):
        assert check.check(file_name(ref).partition("/")[2], SALT) == ref

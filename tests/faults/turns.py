"""Three turns of one agent, and their invariants wherever they are interrupted."""

from collections.abc import Callable

from fabric.errors import CorruptDataError
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, SPEC, make_block, make_manifest, refs_of

ROOT = make_block(1, 3)
TAILS = [make_block(seed, 2, parent=ROOT.ref.block_hash) for seed in (2, 3)]
LAST = make_block(4, 1, parent=TAILS[1].ref.block_hash)
# The second turn replaces the first one's tail, the third only adds.
HISTORY = [[ROOT, TAILS[0]], [ROOT, TAILS[1]], [ROOT, TAILS[1], LAST]]
BLOCKS = {block.ref: block for blocks in HISTORY for block in blocks}

SOUND_ORDER = ("blocks", "record", "acknowledge", "sweep")


def take_turns(
    disk, acknowledge: Callable[[int], None], order: tuple[str, ...] = SOUND_ORDER
) -> None:
    """Recover, then take the remaining turns, with the steps of each in `order`."""
    disk.recover()
    store, records = BlockStore(disk, SPEC, FINGERPRINT), ManifestStore(disk, CLUSTER_KEY)
    store.recover()
    found = records.load_all()
    held = [ref for record in found for ref in refs_of(record)]
    store.retain(held)
    store.sweep()
    done = found[0].revision if found else 0
    acknowledge(done)  # continuing from a record acknowledges it
    for revision, blocks in enumerate(HISTORY, 1):
        if revision <= done:
            continue
        record = make_manifest(blocks, revision)
        for step in order:
            if step == "blocks":
                for block in blocks:
                    if store.find(block.ref.block_hash) is None:
                        block.put_into(store)
                store.retain(refs_of(record))
            elif step == "record":
                records.publish(record)
            elif step == "acknowledge":
                acknowledge(revision)
            elif step == "sweep":
                store.release(held)
                store.sweep()
        held = refs_of(record)


def problem_after_restart(disk, acknowledged: int) -> str | None:
    """Recover from `disk` as a node does; return the first problem since the acknowledged turn."""
    disk.recover()
    store, records = BlockStore(disk, SPEC, FINGERPRINT), ManifestStore(disk, CLUSTER_KEY)
    store.recover()
    found = records.load_all()
    if records.lost_count:
        return "torn record"
    revision = found[0].revision if found else 0
    if revision not in (acknowledged, acknowledged + 1):
        return f"revision {revision} although {acknowledged} was acknowledged"
    if not found:
        return None
    if found != [make_manifest(HISTORY[revision - 1], revision)]:
        return "mixed record"
    store.retain(refs_of(found[0]))
    store.sweep()
    for ref in refs_of(found[0]):
        try:
            if BLOCKS[ref].load_from(store) != BLOCKS[ref].kv:
                return "wrong bytes"
        except CorruptDataError as error:
            return f"revision {revision} lacks a block: {error.message}"
    if len(disk.list_names("blocks")) != len(HISTORY[revision - 1]):
        return "a block too many"
    return "; ".join(store.check_integrity()) or None

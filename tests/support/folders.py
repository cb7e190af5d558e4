"""A node's data folder as a node leaves it, with blocks of every group and two agents."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fabric.ids import AgentId
from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.manifest import Manifest, Placed
from fabric.record.spec_file import SpecRecord
from node.store.block_store import BlockStore
from node.store.encrypted_disk import open_disk
from node.store.folder_format import keep_spec
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import PosixDisk
from tests.support.blocks import (
    CLUSTER_KEY,
    FINGERPRINT,
    MIXED,
    Block,
    make_block,
    make_manifest,
    with_kv,
)

FOLDER = FINGERPRINT.hex()[:16]


@dataclass(frozen=True)
class Stored:
    """The folder of one model, and the blocks and agents stored in it."""

    root: Path
    blocks: dict[str, Block]  # alice's: root, tail, window-root, window-tail, state; bob's: other
    records: dict[str, Manifest]

    def path(self, block: str) -> Path:
        """Return the path of a block."""
        ref = self.blocks[block].ref
        return self.root / "blocks" / f"{ref.name}.{ref.group}"

    def record_path(self, agent: str) -> Path:
        """Return the path of an agent's record."""
        with opened(self.root) as disk:
            names = ManifestStore(disk, CLUSTER_KEY)
            return self.root / names._name(self.records[agent].key)


@contextmanager
def opened(root: Path, *, encrypts: bool | None = None) -> Iterator[PosixDisk]:
    """Open a model's folder as a node does, with `encrypts` as one that encrypts."""
    disk = open_disk(root, "none", CLUSTER_KEY, encrypts=encrypts)
    try:
        yield disk
    finally:
        disk.close()


def make_folder(data: Path, node: str = "node-a", *, encrypts: bool | None = None) -> Stored:
    """Write a data folder with its key and one node's two agents: 300 tokens and two."""
    data.mkdir(exist_ok=True)
    key = data / "cluster.key"
    key.write_text(CLUSTER_KEY.hex())
    key.chmod(0o600)  # independent of the umask of the test run
    blocks = _blocks()
    records = _records(blocks)
    root = data / "nodes" / node / FOLDER
    with opened(root, encrypts=encrypts) as disk:
        store, manifests = BlockStore(disk, MIXED, FINGERPRINT), ManifestStore(disk, CLUSTER_KEY)
        for block in blocks.values():
            block.put_into(store)
        for record in records.values():
            manifests.publish(record)
        keep_spec(disk, SpecRecord(FINGERPRINT, "mixed", MIXED))
    return Stored(root, blocks, records)


def _blocks() -> dict[str, Block]:
    full = make_block(1, 256, MIXED)
    tail = make_block(2, 44, MIXED, full.ref.block_hash)
    kv = full.kv  # as long as a window's, and as good
    return {
        "root": full,
        "tail": tail,
        "window-root": with_kv(full.tokens, kv, MIXED, group=CacheGroup.WINDOW),
        "window-tail": with_kv(tail.tokens, tail.kv, MIXED, tail.parent, CacheGroup.WINDOW),
        "state": with_kv(
            tail.tokens, bytes(MIXED.kv_bytes(0, CacheGroup.STATE)), MIXED, tail.parent,
            CacheGroup.STATE,
        ),
        "other": make_block(3, 2, MIXED),
    }  # fmt: skip


def _records(blocks: dict[str, Block]) -> dict[str, Manifest]:
    alice = replace(
        make_manifest([blocks["root"], blocks["tail"]], epoch=3, revision=7),
        windows=(Placed(blocks["window-root"].ref, 256), Placed(blocks["window-tail"].ref, 300)),
        states=(Placed(blocks["state"].ref, 300),),
        sketch=(1, 2, 3),
    )
    return {"alice": alice, "bob": make_manifest([blocks["other"]], agent=AgentId("bob"))}


def tree(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return everything below a folder: modes, contents, targets of links."""
    paths = [root, *sorted(root.rglob("*"))]
    return {str(path): (path.lstat().st_mode, content(path)) for path in paths}


def content(path: Path) -> bytes:
    if path.is_symlink():
        return bytes(path.readlink())
    return path.read_bytes() if path.is_file() else b""

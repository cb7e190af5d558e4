"""The offline check: findings, untouched files, and repairs."""

import errno
import json
import os
from dataclasses import replace

import pytest

from fabric.errors import CorruptDataError
from fabric.ids import AgentId
from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.manifest import decode_manifest
from fabric.record.spec_file import decode_spec
from node.fsck import run
from node.store.agent_store import AgentStore
from node.store.block_store import BlockStore
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import DiskError, PosixDisk
from tests.support.blocks import CLUSTER_KEY, FINGERPRINT, MIXED, make_block, make_manifest
from tests.support.folders import make_folder, opened, tree


@pytest.fixture
def stored(tmp_path):
    return make_folder(tmp_path / "data")


@pytest.fixture
def check(tmp_path, capsys):
    """Run the command; return its exit status and, of JSON, the only folder's report."""

    def call(*argv: str, data=tmp_path / "data") -> tuple[int, dict]:
        capsys.readouterr()
        status = run.main([f"--data={data}", "--json", *argv])
        out = capsys.readouterr().out
        return status, json.loads(out)["folders"][0] if out else {}

    return call


def kinds(report: dict, *, but: tuple[str, ...] = ("note",)) -> list[str]:
    return sorted({f["kind"] for f in report["findings"] if f["severity"] not in but})


def recover_folder(root) -> tuple[dict[str, int], list[str]]:
    """Start the disk tier as a node does; return agents' lengths and inconsistencies."""
    with opened(root) as disk:
        disk.recover()
        blocks = BlockStore(disk, MIXED, FINGERPRINT)
        manifests = ManifestStore(disk, CLUSTER_KEY)
        store = AgentStore(blocks, manifests, CLUSTER_KEY, FINGERPRINT, MIXED)
        records = store.recover()
        assert manifests.lost_count == 0
        assert all(store.missing(record) == [] for record in records)
        for record in records:
            for ref, span in store.named_refs(record):
                assert ref.block_hash == span.block_hash
        return {record.agent: record.tokens_count for record in records}, blocks.check_integrity()


def test_sound_folder_has_no_findings(stored, check):
    before = tree(stored.root)
    status, report = check("--node=node-a")

    assert (status, report["findings"]) == (0, [])
    assert (report["node"], report["model"]) == ("node-a", "mixed")
    assert report["fingerprint"] == FINGERPRINT.hex()
    assert (report["records"], report["blocks"]) == (2, 6)
    assert report["bytes"] == sum(p.stat().st_size for p in (stored.root / "blocks").iterdir())
    assert check("--repair") == (0, report)
    assert tree(stored.root) == before


def flip(path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(one, other) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def link(path) -> None:
    path.rename(path.parent.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent.parent / "elsewhere")


def pipe(path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def open_to_all(*paths) -> None:
    for path in paths:
        path.chmod(path.stat().st_mode | 0o044)


DAMAGED = ["damaged block", "short record"]
# The damage; the kinds of findings; the tokens left of alice's 300 and bob's 2.
DAMAGE = {
    "first block": (lambda s: flip(s.path("root")), DAMAGED, {"bob": 2}),
    "its header": (lambda s: flip(s.path("root"), 90), DAMAGED, {"bob": 2}),
    "its padding": (
        lambda s: flip(s.path("root"), 9_000), DAMAGED, {"bob": 2},
    ),
    "last block": (
        lambda s: flip(s.path("tail")), DAMAGED, {"alice": 256, "bob": 2},
    ),
    "last block cut": (
        lambda s: cut(s.path("tail")), DAMAGED, {"alice": 256, "bob": 2},
    ),
    "last block gone": (
        lambda s: s.path("tail").unlink(), ["short record"], {"alice": 256, "bob": 2},
    ),
    "a window": (
        lambda s: flip(s.path("window-root")), DAMAGED,
        {"alice": 300, "bob": 2},
    ),
    "a state": (
        lambda s: cut(s.path("state")), DAMAGED,
        {"alice": 300, "bob": 2},
    ),
    "swapped blocks": (
        lambda s: swap(s.path("root"), s.path("window-root")), DAMAGED,
        {"bob": 2},
    ),
    "a linked block": (
        lambda s: link(s.path("tail")), ["not a file", "short record"], {"alice": 256, "bob": 2},
    ),
    "a pipe": (
        lambda s: pipe(s.path("other")), ["not a file", "short record"], {"alice": 300},
    ),
    "a record": (
        lambda s: flip(s.record_path("alice")), ["damaged record"], {"bob": 2},
    ),
    "a record's name": (
        lambda s: s.record_path("bob").rename(s.root / "manifests" / f"{'0' * 32}.mf"),
        ["misplaced record"], {"alice": 300},
    ),
    "the spec": (
        lambda s: flip(s.root / "model.spec"), ["damaged spec"], {"alice": 300, "bob": 2},
    ),
    "modes": (
        lambda s: open_to_all(s.root, s.root / "blocks", s.path("tail")),
        ["wrong mode"], {"alice": 300, "bob": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_repaired(stored, check, name):
    """A check changes nothing; after a repair, neither a check nor a node finds damage."""
    damage, expected, left = DAMAGE[name]
    damage(stored)
    before = tree(stored.root)

    status, report = check()
    assert (status, kinds(report, but=("note", "leftover"))) == (1, expected)
    assert tree(stored.root) == before

    status, repaired = check("--repair")
    assert status == 0
    assert all(f["repaired"] for f in repaired["findings"] if f["severity"] == "problem")
    status, report = check()
    assert (status, kinds(report)) == (0, [])
    assert recover_folder(stored.root) == (left, [])


@pytest.mark.parametrize("damage", [flip, cut])
def test_encrypted_folders_are_checked_and_repaired_the_same_way(tmp_path, check, damage):
    stored = make_folder(tmp_path / "data", encrypts=True)
    assert check()[0] == 0
    damage(stored.path("tail"))
    before = tree(stored.root)
    status, report = check()

    assert (status, kinds(report, but=("note", "leftover"))) == (1, DAMAGED)
    assert tree(stored.root) == before
    assert check("--repair")[0] == 0
    assert check()[0] == 0
    assert recover_folder(stored.root) == ({"alice": 256, "bob": 2}, [])
    assert stored.record_path("alice").read_bytes().startswith(b"MFSEAL")
    (tmp_path / "data" / "cluster.key").unlink()
    assert check()[0] == 2


def test_damaged_files_are_kept_in_quarantine(stored, check):
    flip(stored.path("tail"))
    flip(stored.record_path("bob"))
    check("--repair")
    kept = sorted(path.name for path in (stored.root / "quarantine").iterdir())

    assert len(kept) == 2
    assert any(name.startswith(stored.blocks["tail"].ref.name) for name in kept)
    status, report = check()
    assert status == 0
    assert [f["kind"] for f in report["findings"]] == ["quarantined"] * 2


def test_truncated_record_keeps_identity_and_claims_existing_blocks_only(stored, check):
    stored.path("tail").unlink()
    check("--repair")
    whole, name = stored.records["alice"], stored.record_path("alice")
    record = decode_manifest(name.read_bytes())

    assert (record.agent, record.epoch, record.revision) == (whole.agent, 3, 7)
    assert record.token_ids == whole.token_ids[:256]
    assert record.text == whole.text[:256]
    assert [piece.block for piece in record.pieces] == [stored.blocks["root"].ref]
    assert [place.end for place in record.windows] == [256]
    assert (record.states, record.sketch, record.is_truncated) == ((), (), True)
    # Blocks that only the cut part needed are removed.
    left = {path.suffix for path in (stored.root / "blocks").iterdir()}
    assert left == {".full", ".window"}
    assert not stored.path("state").exists()


def test_leftovers_of_a_crash_are_not_problems(stored, check):
    with opened(stored.root) as disk:
        make_block(9, 5, MIXED).put_into(BlockStore(disk, MIXED, FINGERPRINT))
    for name in ("blocks/.tmp-1", "manifests/.tmp-2", ".tmp-3"):
        (stored.root / name).write_bytes(b"half")
        (stored.root / name).chmod(0o600)
    status, report = check()

    assert (status, kinds(report)) == (0, ["temporary", "unreferenced block"])
    assert report["leftovers_left"] == 4
    assert check("--repair")[0] == 0
    assert check()[1]["findings"] == []
    assert recover_folder(stored.root) == ({"alice": 300, "bob": 2}, [])


def test_strange_files_are_left_alone(stored, check):
    strange = ["NOTES", "blocks/readme.txt", "manifests/../../passwd", "manifests/A.mf"]
    for name in strange:
        (stored.root / name).write_bytes(b"x")
    (stored.root / "folder").mkdir()
    (stored.root / "blocks" / b"\xff\x1b[2J".decode("utf-8", "surrogateescape")).write_bytes(b"")
    (stored.root / "blocks" / "link").symlink_to("/etc/passwd")
    before = tree(stored.root)
    status, report = check("--repair")

    assert status == 0
    assert {f["kind"] for f in report["findings"]} == {"strange"}
    assert len(report["findings"]) == 6
    assert all(f["file"].isprintable() for f in report["findings"])
    assert tree(stored.root) == before


def test_directory_named_like_a_block_is_reported_not_removed(stored, check):
    stored.path("tail").unlink()
    stored.path("tail").mkdir()
    status, report = check("--repair")

    assert (status, kinds(report)) == (1, ["not a file", "short record", "unreferenced block"])
    assert stored.path("tail").is_dir()


def test_names_are_not_checked_without_the_key(stored, check, tmp_path):
    (tmp_path / "data" / "cluster.key").unlink()
    stored.record_path("bob").rename(stored.root / "manifests" / f"{'0' * 32}.mf")
    status, report = check()

    assert status == 0
    assert [f["kind"] for f in report["findings"]] == ["no key"]
    flip(stored.path("tail"))
    assert check()[0] == 1


def test_folder_is_untouched_with_another_clusters_key(stored, check, tmp_path):
    (tmp_path / "data" / "cluster.key").write_text("ab" * 32)
    flip(stored.path("tail"))
    before = tree(stored.root)
    status, report = check("--repair")

    assert (status, kinds(report)) == (1, ["wrong key"])
    assert tree(stored.root) == before


@pytest.mark.parametrize("forged", ["place", "hash"])
def test_sound_blocks_with_names_not_derived_from_tokens_are_cut(stored, check, forged):
    """No reader accepts such blocks: one of another place, and one with an invented name."""
    block = make_block(5, 2, MIXED, parent=b"p" * 32)
    if forged == "hash":
        block = replace(block, ref=replace(block.ref, block_hash=b"h" * 32))
    with opened(stored.root) as disk:
        block.put_into(BlockStore(disk, MIXED, FINGERPRINT))
        record = make_manifest([block], agent=AgentId("carol"))
        ManifestStore(disk, CLUSTER_KEY).publish(record)
    status, report = check()
    short = next(f for f in report["findings"] if f["kind"] == "short record")

    assert status == 1
    assert "0 of 2 tokens" in short["detail"]
    assert ("damaged block" in kinds(report)) is (forged == "hash")
    assert check("--repair")[0] == 0
    assert recover_folder(stored.root) == ({"alice": 300, "bob": 2}, [])


def test_blocks_are_checked_by_headers_without_a_spec(stored, check):
    (stored.root / "model.spec").unlink()
    status, report = check()
    assert (status, [f["kind"] for f in report["findings"]]) == (0, ["no spec"])
    assert report["model"] is None

    for name in ("root", "window-root", "state"):
        flip(stored.path(name), 100)
    status, report = check()
    assert status == 1
    assert [f["kind"] for f in report["findings"]].count("damaged block") == 3


def test_unreadable_file_is_distinguished_from_damage(stored, check, monkeypatch):
    read, name = PosixDisk.read_into, f"blocks/{stored.path('tail').name}"

    def fail_to_read(disk, path, offset, buffers, cause=errno.EACCES):
        if path == name:
            message = "cannot read"
            raise DiskError(message, cause)
        return read(disk, path, offset, buffers)

    monkeypatch.setattr(PosixDisk, "read_into", fail_to_read)
    status, report = check("--repair", "--node=node-a")
    assert status == 1
    assert "unreadable" in kinds(report)
    assert stored.path("tail").exists()


def test_stored_spec_equals_the_models(stored):
    record = decode_spec((stored.root / "model.spec").read_bytes())
    assert (record.fingerprint, record.spec) == (FINGERPRINT, MIXED)
    assert set(record.spec.groups) == set(CacheGroup)
    with pytest.raises(CorruptDataError):
        decode_spec((stored.root / "model.spec").read_bytes()[:-1])

import threading
from dataclasses import replace

import pytest

from fabric.errors import UNDECIDED, CorruptDataError, StaleEpochError
from fabric.ids import AgentId, TenantId
from fabric.kvcache.hashing import agent_digest
from fabric.record.manifest import encode_manifest
from node.store.manifest_store import ManifestStore
from node.store.posix_disk import DiskError, PosixDisk
from tests.support.blocks import AGENT, CLUSTER_KEY, TENANT, make_block, make_manifest


@pytest.fixture
def disk(tmp_path):
    disk = PosixDisk(tmp_path / "root", "none")
    yield disk
    disk.close()


@pytest.fixture
def store(disk):
    return ManifestStore(disk, CLUSTER_KEY)


FIRST = make_manifest([make_block(1)])
NAME = f"manifests/{agent_digest(CLUSTER_KEY, TENANT, AGENT)}.mf"


def versions(store) -> list[tuple[int, int]]:
    return [(manifest.epoch, manifest.revision) for manifest in store.load_all()]


def test_published_records_are_loaded(store, disk):
    other = make_manifest([], agent=AgentId("bob"))
    store.publish(FIRST)
    store.publish(other)
    loaded = ManifestStore(disk, CLUSTER_KEY).load_all()
    assert sorted(loaded, key=lambda m: m.agent) == [FIRST, other]


def test_no_name_appears_on_disk(store, disk):
    store.publish(make_manifest([], agent=AgentId("Alice.Of.Wonderland")))
    [path] = (disk.root / "manifests").iterdir()
    assert path.name.removesuffix(".mf").isalnum()
    assert "alice" not in path.name.lower()


def test_one_record_per_tenant_and_agent(store):
    for tenant in ("a", "b"):
        store.publish(replace(FIRST, tenant=TenantId(tenant)))
    assert len(store.load_all()) == 2


@pytest.mark.parametrize("restarted", [False, True])
def test_later_record_replaces_an_older_never_the_reverse(store, disk, restarted):
    order = [(1, 1), (1, 2), (1, 2), (2, 0), (2, 5), (3, 1)]
    done = (0, 0)
    for epoch, revision in order:
        if restarted:
            store = ManifestStore(disk, CLUSTER_KEY)
        store.publish(replace(FIRST, epoch=epoch, revision=revision))
        done = (epoch, revision)
        for older in [v for v in order if v < done]:
            with pytest.raises(StaleEpochError):
                store.publish(replace(FIRST, epoch=older[0], revision=older[1]))
        assert versions(store) == [done]


def test_removed_record_is_forgotten(store, disk):
    store.publish(replace(FIRST, epoch=5))
    assert store.remove((TENANT, AGENT))
    assert not store.remove((TENANT, AGENT))
    assert store.load_all() == []
    store.publish(FIRST)
    assert versions(store) == [(1, 1)]


def test_empty_store_loads_nothing(store):
    assert store.load_all() == []


def test_invalid_record_is_not_written(store, disk):
    with pytest.raises(CorruptDataError):
        store.publish(replace(FIRST, token_ends=()))
    assert store.load_all() == []


def test_every_flipped_bit_and_truncation_is_detected(store, disk):
    raw = encode_manifest(FIRST)
    damaged = [raw[:cut] for cut in range(len(raw))]
    damaged += [raw + b"\0"]
    damaged += [
        raw[:at] + bytes([raw[at] ^ (1 << at % 8)]) + raw[at + 1 :] for at in range(len(raw))
    ]
    for bad in damaged:
        disk.publish(NAME, [bad])
        assert store.load_all() == []
        assert disk.list_names("manifests") == []
    assert store.lost_count == len(damaged)
    assert disk.list_names("quarantine") != []


def test_damage_affects_one_record_only(store, disk):
    store.publish(FIRST)
    other = make_manifest([], agent=AgentId("bob"))
    store.publish(other)
    path = disk.root / NAME
    path.write_bytes(path.read_bytes()[:-1])
    assert store.load_all() == [other]


def test_record_under_another_agents_name_is_lost(store, disk):
    """Two files swapped: each is sound, neither is where it belongs."""
    disk.publish(NAME, [encode_manifest(make_manifest([], agent=AgentId("bob")))])
    disk.publish("manifests/readme", [encode_manifest(FIRST)])
    assert store.load_all() == []
    assert store.lost_count == 2


def test_damaged_record_does_not_prevent_a_publish(store, disk):
    disk.publish(NAME, [b"noise"])
    store.publish(FIRST)
    assert store.load_all() == [FIRST]
    assert store.lost_count == 1


def fail_with(cause):
    def refuse(*_args):
        message = "cannot read"
        raise DiskError(message, cause)

    return refuse


def test_temporarily_unreadable_record_is_kept(store, disk, monkeypatch):
    store.publish(replace(FIRST, epoch=7))
    again = ManifestStore(disk, CLUSTER_KEY)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read", fail_with(24))
        for call in (again.load_all, lambda: again.publish(FIRST)):
            with pytest.raises(DiskError):
                call()
    assert versions(again) == [(7, 1)]


def test_unreadable_record_is_quarantined(store, disk, monkeypatch):
    store.publish(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "read", fail_with(5))
        assert store.load_all() == []
        assert store.lost_count == 1
    assert disk.list_names("manifests") == []


def test_failed_publish_does_not_advance_the_revision(store, disk, monkeypatch):
    store.publish(FIRST)
    later = replace(FIRST, revision=9)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", fail_with(28))
        with pytest.raises(DiskError):
            store.publish(later)
    store.publish(replace(FIRST, revision=2))
    assert versions(store) == [(1, 2)]


def fail_after_rename(disk, real, times=1):
    """Stand in for `publish`: the file is in place, and the flush after its rename fails."""
    left = [times]

    def publish(name, parts):
        real(name, parts)
        if left[0]:
            left[0] -= 1
            error = DiskError("cannot make durable", 5)
            error.is_in_place = True
            raise error

    return publish


@pytest.mark.parametrize("previous", [FIRST, None])
def test_publish_failing_after_rename_restores_the_old_record(store, disk, monkeypatch, previous):
    store.publish(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", fail_after_rename(disk, disk.publish))
        with pytest.raises(DiskError) as caught:
            store.publish(replace(FIRST, epoch=2, revision=9), previous)
    assert caught.value.code != UNDECIDED
    assert not store.is_doubtful((TENANT, AGENT))
    assert ManifestStore(disk, CLUSTER_KEY).load_all() == [FIRST]
    store.publish(replace(FIRST, revision=2), FIRST)
    assert versions(store) == [(1, 2)]


def test_first_publish_failing_after_rename_leaves_nothing(store, disk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", fail_after_rename(disk, disk.publish))
        with pytest.raises(DiskError):
            store.publish(replace(FIRST, epoch=7))
    assert disk.list_names("manifests") == []
    store.publish(FIRST)
    assert versions(store) == [(1, 1)]


@pytest.mark.parametrize("previous", [FIRST, None])
def test_failed_restoration_is_reported_as_undecided_and_settled_later(
    store, disk, monkeypatch, previous
):
    if previous is not None:
        store.publish(previous)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", fail_after_rename(disk, disk.publish, times=3))
        patch.setattr(disk, "remove", fail_with(5))
        with pytest.raises(DiskError) as caught:
            store.publish(replace(FIRST, epoch=2), previous)
        assert caught.value.code == UNDECIDED
        assert not store.settle((TENANT, AGENT))
    assert store.is_doubtful((TENANT, AGENT))
    assert store.settle((TENANT, AGENT))
    assert not store.is_doubtful((TENANT, AGENT))
    assert ManifestStore(disk, CLUSTER_KEY).load_all() == ([previous] if previous else [])


def test_undecided_record_does_not_block_a_lower_revision(store, disk, monkeypatch):
    """It was never acknowledged: its successor may have a lower revision."""
    store.publish(FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "publish", fail_after_rename(disk, disk.publish, times=2))
        with pytest.raises(DiskError):
            store.publish(replace(FIRST, revision=9), FIRST)
    store.publish(replace(FIRST, revision=2), FIRST)
    assert not store.is_doubtful((TENANT, AGENT))
    assert ManifestStore(disk, CLUSTER_KEY).load_all() == [replace(FIRST, revision=2)]


def test_concurrent_publishes_keep_the_latest(store):
    def publish(revisions):
        for revision in revisions:
            try:
                store.publish(replace(FIRST, revision=revision))
            except StaleEpochError:
                continue

    threads = [threading.Thread(target=publish, args=(range(i, 80, 4),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert versions(store) == [(1, 79)]

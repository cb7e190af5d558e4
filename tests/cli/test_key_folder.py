"""Folders of keys: created once, renewed in time, private."""

import stat
from datetime import UTC, datetime, timedelta

import pytest

from router.cli.errors import CommandError
from router.cli.keys import KeyFolder
from router.tls.authority import MEMBER_VALID, RENEW_BEFORE, Subject, is_issued_by

NOW = datetime(2026, 5, 1, tzinfo=UTC)
HOSTS = Subject.of(["127.0.0.1", "studio.local"])


@pytest.fixture
def keys(tmp_path):
    return KeyFolder.in_data(tmp_path)


def contents(keys):
    return {path.name: path.read_bytes() for path in keys.path.iterdir()}


def test_existing_keys_are_kept(keys):
    assert len(keys.create(HOSTS, NOW)) == 3
    before = contents(keys)

    assert keys.create(HOSTS, NOW) == []
    assert contents(keys) == before
    assert set(before) == {"cluster.key", "ca.pem", "authority.key", "member.pem", "member.key"}
    assert len(bytes.fromhex(before["cluster.key"].decode())) == 32
    modes = {stat.S_IMODE(path.stat().st_mode) for path in keys.path.iterdir()}
    assert modes == {0o600}


def test_only_additional_hosts_need_a_new_certificate(keys):
    keys.create(HOSTS, NOW)
    before = contents(keys)

    assert keys.create(Subject.of(["127.0.0.1"]), NOW) == []
    (done,) = keys.create(Subject.of(["127.0.0.1", "192.168.1.7"]), NOW)
    assert "192.168.1.7" in done
    after = contents(keys)
    changed = {name for name, content in after.items() if content != before[name]}
    assert changed == {"member.pem", "member.key"}


def test_certificate_is_renewed_before_expiry(keys):
    keys.create(HOSTS, NOW)
    ends = NOW + MEMBER_VALID

    assert keys.renewal_reason(HOSTS, ends - RENEW_BEFORE) is None
    assert "ends" in keys.renewal_reason(HOSTS, ends - RENEW_BEFORE + timedelta(seconds=1))


@pytest.mark.parametrize("name", ["member.pem", "member.key", "ca.pem"])
@pytest.mark.parametrize("damage", ["missing", "empty", "anothers"])
def test_mismatched_keys_are_reissued(keys, tmp_path, name, damage):
    keys.create(HOSTS, NOW)
    other = KeyFolder.in_data(tmp_path / "other")
    other.path.mkdir()
    other.create(HOSTS, NOW)
    if damage == "missing":
        (keys.path / name).unlink()
    else:
        new = b"" if damage == "empty" else (other.path / name).read_bytes()
        (keys.path / name).write_bytes(new)

    assert keys.renewal_reason(HOSTS, NOW) is not None
    if name == "ca.pem" and damage != "missing":
        # No authority becomes trusted by mistake.
        with pytest.raises((CommandError, ValueError)):
            keys.create(HOSTS, NOW)
        keys.rotate(HOSTS, NOW, with_authority=True)
    else:
        keys.create(HOSTS, NOW)
    assert keys.renewal_reason(HOSTS, NOW) is None


def test_rotation_keeps_cluster_key_and_authority(keys):
    keys.create(HOSTS, NOW)
    before = contents(keys)
    keys.rotate(HOSTS, NOW, with_authority=False)
    after = contents(keys)

    assert {n for n in after if after[n] != before[n]} == {"member.pem", "member.key"}
    keys.rotate(HOSTS, NOW, with_authority=True)
    last = contents(keys)
    assert last["cluster.key"] == before["cluster.key"]
    assert {n for n in last if last[n] == before[n]} == {"cluster.key"}
    assert not is_issued_by(after["member.pem"], last["ca.pem"])


def test_lost_authority_key_is_reported_with_remedy(keys):
    keys.create(HOSTS, NOW)
    keys.authority_key.unlink()

    assert keys.create(HOSTS, NOW) == []  # existing keys stay valid
    with pytest.raises(CommandError, match="rotate --authority"):
        keys.rotate(HOSTS, NOW, with_authority=False)

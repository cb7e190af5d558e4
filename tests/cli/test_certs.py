"""`macfabric certs`: keys for the Macs of a cluster file."""

import json
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml

from router.cli.main import main
from router.tls.authority import expires_at, subject_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """The shipped cluster file, in a temporary home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    path = tmp_path / "cluster.yaml"
    path.write_text((ROOT / "cluster.yaml").read_text())
    return path


def run(capsys, *argv):
    status = main([*argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_certs_create_writes_keys_to_the_mounted_folder(shipped, capsys, tmp_path):
    status, printed = run(capsys, "certs", "create", str(shipped))
    folder = Path(printed["folder"])

    assert status == 0
    assert folder == tmp_path / "home/.macfabric/cluster/keys"
    assert {path.name for path in folder.iterdir()} == {
        *("cluster.key", "ca.pem", "member.pem", "member.key", "ray.token")
    }
    assert (folder.parent / "authority.key").exists()  # which travels nowhere
    for path in (folder, *folder.iterdir(), folder.parent / "authority.key"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    subject = subject_of((folder / "member.pem").read_bytes())
    assert {"192.168.1.10", "192.168.1.11", "192.168.1.12", "127.0.0.1"} <= subject.addresses
    assert datetime.fromisoformat(printed["expires"]) - datetime.now(UTC) > timedelta(days=800)

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(capsys, "certs", "create", str(shipped))[1]["done"] == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_adding_a_mac_renews_only_the_certificate(shipped, capsys):
    folder = Path(run(capsys, "certs", "create", str(shipped))[1]["folder"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    text = shipped.read_text()
    shipped.write_text(text.replace("    - 192.168.1.12\n", "    - 192.168.1.12\n    - 10.9.8.7\n"))
    run(capsys, "certs", "create", str(shipped))
    after = {path.name: path.read_bytes() for path in folder.iterdir()}

    assert {n for n in after if after[n] != before[n]} == {"member.pem", "member.key"}
    assert "10.9.8.7" in subject_of(after["member.pem"]).addresses


def test_rotation_keeps_cluster_key_and_optionally_authority(shipped, capsys):
    folder = Path(run(capsys, "certs", "create", str(shipped))[1]["folder"])
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    run(capsys, "certs", "rotate", str(shipped))
    after = {path.name: path.read_bytes() for path in folder.iterdir()}

    assert {n for n in after if after[n] == before[n]} == {"cluster.key", "ca.pem"}
    run(capsys, "certs", "rotate", "--authority", str(shipped))
    last = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {n for n in last if last[n] == after[n]} == {"cluster.key"}


def test_local_keys_are_rotated_only_while_nothing_runs(tmp_path, capsys):
    from router.cli.data_folder import DataFolder

    status, printed = run(capsys, "certs", "rotate", "--data", str(tmp_path / "data"))
    assert status == 0
    first = expires_at((tmp_path / "data/member.pem").read_bytes())
    assert datetime.fromisoformat(printed["expires"]) == first
    with DataFolder(tmp_path / "data").claimed():
        assert main(["certs", "rotate", "--data", str(tmp_path / "data")]) == 1


def test_file_without_key_mount_is_refused(shipped, capsys):
    config = yaml.safe_load(shipped.read_text())
    del config["file_mounts"]["~/macfabric/keys"]
    shipped.write_text(yaml.safe_dump(config))

    assert main(["certs", "create", str(shipped)]) == 2
    assert "~/macfabric/keys" in capsys.readouterr().err

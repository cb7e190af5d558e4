"""Folder and keys of a backup: refused folders, and permissions of the files."""

import json
import stat

import pytest

from router.cli.backup.backup_folder import BackupAgent, BackupFolder, BackupList, file_name
from router.cli.backup.key_material import (
    KeyMaterial,
    find_keys,
    new_key,
    read_keys,
    read_material,
    write_keys,
    write_material,
)
from router.cli.errors import CommandError
from tests.support.keys import make_keys

MATERIAL = KeyMaterial(new_key(), {"cluster.key": "c" * 64, "ca.pem": "certificate"})


def agent(name="mira", **fields):
    row = {
        "tenant": None, "file": file_name(None, name), "bytes": 3, "sha256": "0" * 64, "tokens": 1,
        "epoch": 1, "revision": 1, "model": "m", "fingerprint": "f", "saved_at": "now",
    }  # fmt: skip
    return BackupAgent(id=name, **(row | fields))


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "passphrase"
    path.write_text("correct horse battery staple\n")
    path.chmod(0o600)
    return path


def test_list_is_read_as_written_and_private(tmp_path):
    folder = BackupFolder(tmp_path / "backup")
    contents = folder.prepare("f1").with_agents({("", "mira"): agent()})
    folder.write(contents)

    assert folder.read() == contents
    assert folder.prepare("f1") == contents
    assert folder.prepare(None) == contents
    assert stat.S_IMODE(folder.list.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_foreign_folders_are_refused_and_unchanged(tmp_path):
    other, used = BackupFolder(tmp_path / "other"), BackupFolder(tmp_path / "used")
    other.write(other.prepare("f1"))
    used.path.mkdir()
    (used.path / "thesis.txt").write_text("mine")
    file = BackupFolder(tmp_path / "thesis")
    file.path.write_text("mine")

    for folder, why in ((other, "another fabric"), (used, "nor a backup"), (file, "not a dir")):
        with pytest.raises(CommandError, match=f"(?i){why}"):
            folder.prepare("f2")
    assert [path.name for path in used.path.iterdir()] == ["thesis.txt"]
    with pytest.raises(CommandError, match=r"not a backup: it has no backup\.json"):
        BackupFolder(tmp_path / "nothing").read()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not valid JSON"),
        ("[]", "its format is None"),
        (json.dumps({"format": "macfabric-backup-9"}), "macfabric-backup-9"),
        (json.dumps({"format": "macfabric-backup-1", "agents": 3}), "agents"),
    ],
)
def test_damaged_list_is_an_error_with_a_reason(tmp_path, text, why):
    (tmp_path / "backup.json").write_text(text)
    with pytest.raises(CommandError, match=why):
        BackupFolder(tmp_path).read()


def test_list_cannot_name_files_outside_of_its_folder(tmp_path):
    folder = BackupFolder(tmp_path / "backup")
    contents = folder.prepare(None)
    folder.write(contents.with_agents({("", "mira"): agent(file="../../etc/passwd")}))

    with pytest.raises(CommandError, match="not a valid name of an agent's file"):
        folder.read()


def test_file_that_changed_is_reported(tmp_path):
    folder = BackupFolder(tmp_path / "backup")
    folder.prepare(None)
    saved = agent(sha256="ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert "no such file" in folder.damage_reason(saved)
    for content, why in ((b"abc", None), (b"abcd", "4 bytes"), (b"abd", "checksum")):
        folder.file_of(saved).write_bytes(content)
        found = folder.damage_reason(saved)
        assert found is None if why is None else why in found


def test_keys_without_key_file_are_for_their_owner_only(tmp_path):
    path = tmp_path / "keys.json"
    write_material(path, MATERIAL, None)

    assert read_material(path, None) == MATERIAL
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(CommandError, match="chmod 600"):
        read_material(path, None)


def test_keys_with_key_file_are_encrypted(tmp_path, key_file):
    path, wrong = tmp_path / "keys.json", tmp_path / "wrong"
    wrong.write_text("another passphrase")
    wrong.chmod(0o600)
    write_material(path, MATERIAL, key_file)

    assert read_material(path, key_file) == MATERIAL
    raw = path.read_text()
    assert "cccc" not in raw
    assert MATERIAL.signing_key not in raw
    for given, why in ((None, "--key-file"), (wrong, "another key file")):
        with pytest.raises(CommandError, match=why):
            read_material(path, given)
    row = json.loads(raw)
    row["sealed"] = row["sealed"][:-8] + "AAAAAAA="
    path.write_text(json.dumps(row))
    with pytest.raises(CommandError, match="or is damaged"):
        read_material(path, key_file)


def test_keys_of_a_fabric_come_back_and_never_replace_others(tmp_path):
    keys, other, empty = tmp_path / "keys", tmp_path / "other", tmp_path / "empty"
    for folder in (keys, other, empty):
        folder.mkdir()
    make_keys(keys)
    make_keys(other)
    files = read_keys(keys)

    assert set(files) == {"cluster.key", "ca.pem", "authority.key"}
    assert write_keys(empty, files) == ["cluster.key", "ca.pem", "authority.key"]
    assert write_keys(empty, files) == []
    assert read_keys(empty) == files
    before = read_keys(other)
    with pytest.raises(CommandError, match="belongs to another fabric"):
        write_keys(other, files)
    assert read_keys(other) == before
    assert find_keys(empty, None) == empty
    with pytest.raises(CommandError, match=r"has no cluster\.key"):
        find_keys(empty, tmp_path)


def test_list_is_interrupted_until_it_ends():
    assert BackupList().ended_at is None

"""The data folder: private, claimed by one fabric at a time, tolerant of damage."""

import os
import stat

import pytest
import yaml

from fabric.settings import FabricSettings, RouterSettings, parse_settings
from router.cli.config_file import read_settings
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.errors import CommandError
from router.supervise.processes import ProcessId, identify


def test_all_files_are_private(tmp_path):
    folder = DataFolder(tmp_path / "a" / "b")
    folder.create()
    folder.write_settings(FabricSettings())
    folder.write_run(identify(os.getpid()), {})
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.path.rglob("*")}

    assert set(modes) == {"logs", "tmp", "config.yaml", "run.json"}
    assert all(mode & 0o077 == 0 for mode in modes.values())


def test_folder_writable_by_others_is_refused(tmp_path):
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)

    with pytest.raises(CommandError, match="other users"):
        DataFolder(open_to_all).create()
    assert list(open_to_all.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_folder_of_another_user_is_refused(tmp_path):
    anothers = tmp_path / "anothers"
    anothers.mkdir(mode=0o700)
    os.chown(anothers, 65534, 65534)

    with pytest.raises(CommandError, match="other users"):
        DataFolder(anothers).create()


def test_folder_readable_by_others_becomes_private(tmp_path):
    folder = DataFolder(tmp_path / "read")
    folder.path.mkdir(mode=0o755)
    (folder.path / "logs").mkdir(mode=0o755)
    (folder.path / "logs" / "old.log").touch(mode=0o644)
    (folder.path / "logs" / "link").symlink_to(tmp_path)
    before = tmp_path.stat().st_mode
    folder.create()

    assert stat.S_IMODE((folder.path / "logs" / "old.log").stat().st_mode) == 0o600
    assert tmp_path.stat().st_mode == before
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "logs").stat().st_mode) == 0o700


def test_temporary_files_of_libraries_are_removed(tmp_path):
    folder = DataFolder(tmp_path / "data")
    folder.create()
    temporary, elsewhere = folder.path / "tmp", tmp_path / "elsewhere"
    for path in (temporary / "ray" / "session_1", temporary / "mlx" / "cpu", elsewhere):
        path.mkdir(parents=True)
        (path / "file").write_text("x")
    (temporary / "note").write_text("x")
    (temporary / "link").symlink_to(elsewhere)

    folder.remove_temporaries()

    assert [path.name for path in temporary.iterdir()] == ["mlx"]
    assert (temporary / "mlx" / "cpu" / "file").exists()
    assert (elsewhere / "file").exists()


def test_folder_is_claimed_by_one_fabric_at_a_time(tmp_path):
    folder = DataFolder(tmp_path)
    with folder.claimed(), pytest.raises(CommandError, match="running"), folder.claimed():
        pytest.fail("claimed twice")
    with folder.claimed():
        pass


def test_settings_round_trip(tmp_path):
    router = RouterSettings(port=0, api_keys={"family": "0123456789abcdef"})
    settings = FabricSettings(model="/m", local_nodes=("node-a", "node-b"), router=router)
    folder = DataFolder(tmp_path)
    folder.write_settings(settings)

    assert read_settings(folder.config) == settings
    written = yaml.safe_load(folder.config.read_text())
    assert parse_settings(written["metadata"]["macfabric"]) == settings


def test_process_record_round_trips(tmp_path):
    folder = DataFolder(tmp_path)
    up, child = ProcessId(7, "then"), ProcessId(8, "later")
    folder.write_run(up, {"router": child})

    assert folder.read_run() == (up, {"router": child})


def test_damaged_process_record_is_ignored(tmp_path):
    folder = DataFolder(tmp_path)
    for text in ("", "[]", '{"up": 3, "processes": []}', '{"processes": {"a": {"pid": "x"}}}'):
        folder.run.write_text(text)
        assert folder.read_run() == (None, {})


def test_missing_process_record_is_empty(tmp_path):
    assert DataFolder(tmp_path).read_run() == (None, {})


def test_default_data_dir_follows_environment_and_settings(monkeypatch):
    monkeypatch.delenv("MACFABRIC_DATA", raising=False)
    assert default_data_dir().name == ".macfabric"
    assert str(default_data_dir(FabricSettings(data_dir="/x"))) == "/x"

    monkeypatch.setenv("MACFABRIC_DATA", "/y")
    assert str(default_data_dir(FabricSettings(data_dir="/x"))) == "/y"


def test_ray_folder_left_by_a_crash_is_removed(tmp_path):
    folder = DataFolder(tmp_path)
    outside, strange = tmp_path / "macfabric-ray-x1", tmp_path / "documents"
    for path in (outside, strange):
        path.mkdir()
        folder.write_run(ProcessId(7, "then"), {}, path)
        folder.forget_run()

    assert not outside.exists()
    assert strange.exists()
    assert not folder.run.exists()

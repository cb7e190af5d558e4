"""A node's folder is left out of Time Machine's backups, once it starts on a Mac."""

from functools import partial

import pytest

from node import mac_services
from node import service as service_module
from node.mac_services import exclude_from_backups
from tests.support.services import running
from tests.support.tiny_models import ONE_LAYER, write_model


@pytest.fixture
def tmutil(tmp_path, monkeypatch):
    """Replace tmutil with a program that records its arguments and runs the test's script."""
    program, log = tmp_path / "tmutil", tmp_path / "log"

    def set_script(script="exit 0"):
        program.write_text(f'#!/bin/sh\necho "$@" >> "{log}"\n{script}\n')
        program.chmod(0o755)
        return log

    monkeypatch.setattr(mac_services, "TMUTIL", str(program))
    return set_script


def test_data_folder_is_excluded(tmp_path, tmutil, caplog):
    log = tmutil()
    exclude_from_backups(tmp_path / "a node", "darwin")
    assert log.read_text() == f"addexclusion {tmp_path}/a node\n"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo 'Error -43' >&2; exit 1", "Error -43"), ("exit 2", "status 2")],
)
def test_refusal_of_tmutil_is_logged(tmp_path, tmutil, caplog, script, reason):
    tmutil(script)
    exclude_from_backups(tmp_path, "darwin")
    (record,) = caplog.records
    assert reason in record.getMessage()


def test_missing_or_hanging_tmutil_does_not_block_start(tmp_path, tmutil, caplog, monkeypatch):
    exclude_from_backups(tmp_path, "darwin")
    monkeypatch.setattr(mac_services, "TIMEOUT_S", 0.1)
    tmutil("exec sleep 60")
    exclude_from_backups(tmp_path, "darwin")
    reasons = [record.getMessage().rpartition(": ")[2] for record in caplog.records]
    assert reasons == ["FileNotFoundError", "TimeoutExpired"]


def test_other_systems_do_not_run_tmutil(tmp_path, tmutil):
    log = tmutil()
    exclude_from_backups(tmp_path, "linux")
    assert not log.exists()


def test_node_excludes_its_folder_on_start(tmp_path, tmutil, monkeypatch):
    log, disk = tmutil(), tmp_path / "disk"
    on_macos = partial(exclude_from_backups, platform="darwin")
    monkeypatch.setattr(service_module, "exclude_from_backups", on_macos)
    with running(disk, str(write_model(tmp_path / "model", ONE_LAYER))) as service:
        folder = service._config.data_dir
    assert log.read_text() == f"addexclusion {folder}\n"
    assert folder.is_relative_to(disk)

"""Files that operating systems leave on drives, and drives that are read-only at a node's start."""

import os
import subprocess
from pathlib import Path

import pytest

from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import AgentList, ListAgents
from fabric.ids import AgentId, OperationId
from fabric.turn.generation import CacheTier
from node.fsck import run
from tests.support.services import KEY, TENANT, ask, call, running
from tests.support.tiny_models import LLAMA, write_model

SMALL = {**LLAMA, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
PROMPT = "the cat sat on the mat and the dog sat on the log. " * 40
BRIEF = {"max_tokens": 4, "ignore_eos": True}
APPLE_DOUBLE = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        " + bytes(4_000)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "models" / "small", SMALL)


def add_twins(folder: Path) -> int:
    """Add a `._` file beside every file, and `.DS_Store` to every folder, as macOS does."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name[:2] != "._"]
    for path in files:
        path.with_name(f"._{path.name}").write_bytes(APPLE_DOUBLE)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            (path / ".DS_Store").write_bytes(bytes(6_148))
    return len(files)


def agents_of(service) -> set[str]:
    return {each.view.agent for each in call(service, ListAgents(), AgentList).agents}


def test_apple_double_files_are_ignored(model, tmp_path, capsys):
    """macOS leaves them beside stored and model files, also while a node runs."""
    data = tmp_path / "data"
    add_twins(model)
    with running(data / "nodes", str(model)) as service:
        first = ask(service, PROMPT, agent="mira", **BRIEF)
        ask(service, PROMPT[9:], agent="ivan", **BRIEF)
        assert add_twins(data / "nodes") >= 4
    for _ in range(2):
        with running(data / "nodes", str(model)) as service:
            assert agents_of(service) == {"mira", "ivan"}
            again = ask(service, PROMPT, agent="mira", **BRIEF)
            assert again.admitted.cache is CacheTier.DISK
            assert again.text == first.text
            assert again.admitted.cached_tokens == again.admitted.prompt_tokens - 1
            assert service.node.health.degraded is None
            assert service.node.resources.store.blocks.check_integrity() == []
            add_twins(data / "nodes")
    (data / "cluster.key").write_text(KEY.hex())
    (data / "cluster.key").chmod(0o600)
    capsys.readouterr()
    assert run.main([f"--data={data}"]) == 0, capsys.readouterr().out
    with running(data / "nodes", str(model)) as service:
        message = EraseAgent(TENANT, AgentId("mira"), 1, OperationId("erase-twins"), 1.0)
        assert call(service, message, EraseReceipt).bytes_removed > 0
        assert agents_of(service) == {"ivan"}
    with running(data / "nodes", str(model)) as service:
        assert agents_of(service) == {"ivan"}


def test_read_only_drive_is_read_at_start(model, tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    mount = ["mount", "-t", "tmpfs", "none", drive]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a drive takes the rights of root")
    try:
        with running(drive, str(model)) as service:
            first = ask(service, PROMPT, agent="mira", **BRIEF)
        subprocess.run(["mount", "-o", "remount,ro", drive], check=True)
        with running(drive, str(model)) as service:
            again = ask(service, PROMPT, agent="mira", **BRIEF)
            assert again.admitted.cache is CacheTier.DISK
            assert again.text == first.text
            more = ask(service, f"{PROMPT}{again.text} and then", agent="mira", **BRIEF)
            assert not more.finished.durable
            assert service.node.health.degraded
    finally:
        subprocess.run(["umount", "-l", drive], check=False)

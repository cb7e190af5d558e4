"""Data folders that vanish under a running node: memory stays, durability is not overstated."""

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.control.node_calls import AgentList, AgentView, Done, Flush, ListAgents, PinAgent
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import CacheTier
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import LLAMA, write_model
from tests.support.waiting import wait_until

SMALL = {**LLAMA, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
WORDS = "the cat sat on the mat and the dog sat on the log. "
PROMPT = WORDS * 40
BRIEF = {"max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "small", SMALL))


def check_folders(service) -> bool:
    """Run the node's check of its folders now."""
    work = service.node.background.folders.ensure_folders()
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def view_of(service, agent: str):
    listed = call(service, ListAgents(), AgentList)
    return next((e.view for e in listed.agents if e.view.agent == agent), None)


def erase(service, agent: str, number: int = 1) -> EraseReceipt:
    message = EraseAgent(TENANT, AgentId(agent), 1, OperationId(f"erase-{number:06d}"), 1.0)
    return call(service, message, EraseReceipt)


def model_folder(service) -> Path:
    return service._disk.root


def lengthened(text: str) -> str:
    return f"{PROMPT}{text} and then {WORDS * 2}"


def require_sound(service) -> None:
    assert service.node.health.degraded is None
    assert service.node.resources.store.blocks.check_integrity() == []


@pytest.mark.parametrize("encrypts", [False, True])
@pytest.mark.parametrize("part", ["model", "data", "blocks", "manifests"])
def test_removed_folder_is_recreated(model, tmp_path, part, encrypts):
    with running(tmp_path, model, encrypt_at_rest=encrypts) as service:
        first = ask(service, PROMPT, agent="mira", **BRIEF)
        assert first.finished.durable
        call(service, PinAgent(TENANT, AgentId("mira"), pinned=True), AgentView)
        root = model_folder(service)
        removed = {"model": root, "data": tmp_path}.get(part, root / part)
        shutil.rmtree(removed)
        second = ask(service, lengthened(first.text), agent="mira", **BRIEF)
        assert second.admitted.cache is CacheTier.HOT
        wait_until(lambda: view_of(service, "mira").durable)
        wait_until(lambda: service.node.health.degraded is None)
        assert "durable" in call(service, Flush(drop_hot=True), Done).detail
        require_sound(service)
        assert service.node.resources.table.hot_bytes == 0
        assert root.joinpath("model.spec").exists()
        assert root.joinpath("sealed").exists() == encrypts
    with running(tmp_path, model, encrypt_at_rest=encrypts) as service:
        assert view_of(service, "mira").pinned
        again = ask(service, lengthened(first.text), agent="mira", **BRIEF)
        assert again.admitted.cache is CacheTier.DISK
        assert again.text == second.text


def test_missing_folder_is_never_reported_as_durable(model, tmp_path):
    with running(tmp_path / "data", model) as service:
        ask(service, PROMPT, agent="hot", **BRIEF)
        ask(service, PROMPT + "more", agent="warm", **BRIEF)
        root = model_folder(service)
        away = tmp_path / "away"
        root.rename(away)
        root.parent.joinpath("elsewhere").mkdir()
        root.symlink_to(root.parent / "elsewhere")  # nothing may be created there
        root.parent.joinpath("elsewhere").chmod(0o777)
        reply = ask(service, PROMPT, agent="new", **BRIEF)
        assert not reply.finished.durable
        assert service.node.health.degraded
        assert "memory only" in call(service, Flush(drop_hot=True), Done).detail
        assert not check_folders(service)
        for agent in ("hot", "warm", "new"):
            assert not view_of(service, agent).durable
            assert service.node.resources.table.get((TENANT, agent)).cache is not None
        with pytest.raises(FabricError):
            erase(service, "warm")
        assert service.node.health.degraded
        root.unlink()
        away.rename(root)
        assert check_folders(service)
        wait_until(lambda: view_of(service, "new").durable and view_of(service, "hot").durable)
        wait_until(lambda: service.node.health.degraded is None)
        assert view_of(service, "warm") is None
        require_sound(service)
    with running(tmp_path / "data", model) as service:
        assert view_of(service, "warm") is None
        assert ask(service, PROMPT, agent="hot", **BRIEF).admitted.cache is CacheTier.DISK


def test_erased_agent_does_not_return_with_a_restored_folder(model, tmp_path):
    """The folder is restored as before the erasure, with the erased agent's record."""
    copy = tmp_path / "copy"
    with running(tmp_path / "data", model) as service:
        ask(service, PROMPT, agent="gone", **BRIEF)
        ask(service, PROMPT[10:], agent="kept", **BRIEF)
        shutil.copytree(tmp_path / "data", copy, symlinks=True)
        receipt = erase(service, "gone")
        assert receipt.bytes_removed > 0
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(copy, tmp_path / "data", symlinks=True)
        assert check_folders(service)
        wait_until(lambda: view_of(service, "kept").durable)
        assert view_of(service, "gone") is None
        call(service, Flush(drop_hot=True), Done)
        require_sound(service)
        digest = service.node.resources.erased.digest(TENANT, AgentId("gone"))
        assert [path.parent.name for path in (tmp_path / "data").rglob(f"{digest}*")] == ["agents"]
    with running(tmp_path / "data", model) as service:
        assert view_of(service, "gone") is None
        assert ask(service, PROMPT[10:], agent="kept", **BRIEF).admitted.cache is CacheTier.DISK


def test_restored_older_record_is_replaced_by_the_one_in_memory(model, tmp_path):
    copy = tmp_path / "copy"
    with running(tmp_path / "data", model) as service:
        first = ask(service, PROMPT, agent="mira", **BRIEF)
        shutil.copytree(tmp_path / "data", copy, symlinks=True)
        second = ask(service, lengthened(first.text), agent="mira", **BRIEF)
        assert first.admitted.prompt_tokens > BLOCK_TOKENS
        assert second.finished.durable
        call(service, Flush(drop_hot=True), Done)
        tokens = view_of(service, "mira").tokens
        shutil.rmtree(tmp_path / "data")
        shutil.copytree(copy, tmp_path / "data", symlinks=True)
        assert check_folders(service)
        assert view_of(service, "mira").durable
        assert 0 < view_of(service, "mira").tokens < tokens
        require_sound(service)
        assert ask(service, lengthened(first.text), agent="mira", **BRIEF).text == second.text


def test_receipt_does_not_count_missing_files(model, tmp_path):
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="mira", **BRIEF)
        for path in model_folder(service).joinpath("blocks").iterdir():
            path.unlink()
        receipt = erase(service, "mira")
        assert receipt.existed
        assert receipt.record_removed
        assert (receipt.blocks_removed, receipt.bytes_removed) == (0, 0)
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="mira2", **BRIEF)
        call(service, Flush(drop_hot=True), Done)
        shutil.rmtree(model_folder(service))
        assert check_folders(service)
        assert (erase(service, "mira2").bytes_removed) == 0


def _mount(path: Path) -> bool:
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "none", str(path)]
    return (
        os.geteuid() == 0
        and not subprocess.run(command, check=False, capture_output=True).returncode
    )


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@pytest.fixture
def drive(tmp_path):
    """Return an empty mounted drive."""
    path = tmp_path / "drive"
    if not _mount(path):
        pytest.skip("mounting a drive takes the rights of root")
    yield path
    _unmount(path)


def run_upkeep(service) -> None:
    work = service.node.background.upkeep.round()
    asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def test_mount_point_of_an_unplugged_drive_is_not_filled(model, tmp_path, drive):
    with running(drive / "data", model) as service:
        first = ask(service, PROMPT, agent="mira", **BRIEF)
        saved = tmp_path / "saved"
        shutil.copytree(drive / "data", saved, symlinks=True)
        _unmount(drive)
        second = ask(service, lengthened(first.text), agent="mira", **BRIEF)
        assert not second.finished.durable
        assert not check_folders(service)
        call(service, Flush(), Done)
        run_upkeep(service)
        assert list(drive.iterdir()) == []
        assert "gone" in service.node.health.degraded
        assert _mount(drive)
        shutil.copytree(saved, drive / "data", symlinks=True)
        assert check_folders(service)
        wait_until(lambda: view_of(service, "mira").durable)
        require_sound(service)
    with running(drive / "data", model) as service:
        again = ask(service, lengthened(first.text), agent="mira", **BRIEF)
        assert again.admitted.cache is CacheTier.DISK
        assert again.text == second.text


@pytest.mark.parametrize("other", ["empty", "another node's", "older than identities"])
def test_another_drive_at_the_same_path_is_not_touched(model, tmp_path, drive, other):
    """The other drive's files are the user's; the agents are on the first drive."""
    with running(drive / "data", model) as service:
        first = ask(service, PROMPT, agent="mira", **BRIEF)
        ask(service, PROMPT[9:], agent="cold", **BRIEF)
        call(service, Flush(drop_hot=True), Done)
        ask(service, PROMPT, agent="mira", **BRIEF)
        saved = tmp_path / "saved"
        shutil.copytree(drive / "data", saved, symlinks=True)
        _unmount(drive)
        assert _mount(drive)
        if other != "empty":
            shutil.copytree(saved, drive / "data", symlinks=True)
            identity = drive / "data" / "node-a" / "identity"
            identity.write_bytes(b"0123456789abcdef" * 2)
            if other != "another node's":
                identity.unlink()
        before = {path: path.stat().st_mtime_ns for path in drive.rglob("*")}
        assert not ask(service, lengthened(first.text), agent="mira", **BRIEF).finished.durable
        assert not check_folders(service)
        call(service, Flush(), Done)
        run_upkeep(service)
        assert {path: path.stat().st_mtime_ns for path in drive.rglob("*")} == before
        assert "another drive is mounted" in service.node.view().degraded
        assert not view_of(service, "cold").durable
        _unmount(drive)
        assert _mount(drive)
        shutil.copytree(saved, drive / "data", symlinks=True)
        assert check_folders(service)
        wait_until(lambda: view_of(service, "mira").durable and view_of(service, "cold").durable)
        require_sound(service)
        assert ask(service, PROMPT[9:], agent="cold", **BRIEF).admitted.cache is CacheTier.DISK


def test_recreated_folder_keeps_its_identity(model, tmp_path, caplog):
    caplog.set_level("INFO", "node.store.data_folders")
    path = tmp_path / "node-a" / "identity"
    with running(tmp_path, model) as service:
        assert "began a new data folder" in caplog.text
        caplog.clear()
        ask(service, PROMPT, agent="mira", **BRIEF)
        first = path.read_bytes()
        shutil.rmtree(tmp_path / "node-a")
        assert check_folders(service)
        assert path.read_bytes() == first, "the drive is not treated as another one"
    with running(tmp_path, model):
        assert path.read_bytes() == first
        assert path.stat().st_mode & 0o077 == 0
    assert "began" not in caplog.text
    path.write_bytes(b"damaged")
    with running(tmp_path, model):
        assert len(path.read_bytes()) == len(first)

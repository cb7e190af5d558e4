"""A node's folder and an agent's file, written before any format change.

Written at 958b039 by a node on `recall`: `mira` with two turns behind her, `ivan` erased.
"""

import shutil
from pathlib import Path

import pytest

from fabric.control.erasure_calls import KnownErasures, ShareErasures
from fabric.kvcache import fingerprint
from fabric.turn.generation import CacheTier, MatchKind
from node.fsck import run
from node.mlx import loaded_model
from tests.formats.samples import NUMERICS
from tests.support.hibernation import resume
from tests.support.services import KEY, ask, call, running

HERE = Path(__file__).parent
STORE = "store_1"
VAULT = [
    {"role": "user", "content": "The vault code of Mira is otter lantern quartz."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": "The vault code of Mira is"},
]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the store, and use the numerics tag of the machine that wrote it."""
    monkeypatch.setattr(loaded_model, "numerics_tag", lambda: NUMERICS)
    shutil.copytree(HERE / STORE, tmp_path / "nodes" / STORE)
    for path in (tmp_path / "nodes").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (tmp_path / "cluster.key").write_text(KEY.hex())
    (tmp_path / "cluster.key").chmod(0o600)
    return tmp_path


def test_agents_of_first_store_continue(data: Path) -> None:
    """Owner, epoch, pin and every token are kept; erased agents stay erased."""
    with running(data / "nodes", "recall", STORE) as service:
        [mira] = [agent.manifest for agent in service.node.resources.table]
        erased = call(service, ShareErasures(()), KnownErasures).erased
        assert (mira.agent, mira.epoch, mira.tokens_count, mira.pinned) == ("mira", 1, 32, True)
        assert [item.epoch for item in erased] == [1]
        assert service.node.resources.store.blocks.check_integrity() == []
        reply = ask(service, VAULT, agent="mira", epoch=1, max_tokens=8)

    assert reply.text == " otter lantern quartz."
    assert reply.admitted.cache is CacheTier.DISK
    assert reply.admitted.cached_tokens == reply.admitted.prompt_tokens - 1


def test_first_store_passes_fsck(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`macfabric fsck` reads spec, record and blocks, and recomputes every name."""
    assert run.main([f"--data={data}"]) == 0, capsys.readouterr().out


def test_hibernation_file_of_first_store_resumes(data: Path, tmp_path: Path) -> None:
    """Another node of the same fabric resumes the file without computing its tokens."""
    with running(tmp_path / "other", "recall") as service:
        resumed = resume(service, (HERE / "mira.mfa").read_bytes(), "mira", epoch=2)
        assert resumed["view"]["tokens"] == 32, resumed
        reply = ask(service, VAULT, agent="mira", epoch=2, max_tokens=8)

    assert reply.text == " otter lantern quartz."
    assert reply.admitted.cache is CacheTier.DISK


def test_other_layout_version_leaves_the_store_untouched(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The store is not misread; it stays on disk, and that is logged."""
    caplog.set_level("INFO", "node.tiers.other_folders")
    monkeypatch.setattr(fingerprint, "LAYOUT_VERSION", fingerprint.LAYOUT_VERSION + 1)
    [before] = (data / "nodes" / STORE).glob("*/blocks/*")
    with running(data / "nodes", "recall", STORE) as service:
        assert list(service.node.resources.table) == []
        reply = ask(service, VAULT, agent="mira", max_tokens=8)
        waiting = [folder.name for folder in service.node.tiers.budget._others._folders.list_all()]

    assert reply.admitted.match is MatchKind.NONE
    assert waiting == [before.parent.parent.name]
    assert before.is_file()
    [message] = [line for line in caplog.messages if "other versions" in line]
    assert "wait in 1 folders (68 KiB)" in message

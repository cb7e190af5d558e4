"""`macfabric uninstall` in temporary homes: removed files, kept files, and links."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from router.cli import uninstall
from router.cli.data_folder import DataFolder
from router.supervise.processes import identify
from tests.support.keys import make_keys
from tests.support.typed import Keyboard


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with all that a fabric, a cluster file and `ray up` leave, and files of its user."""
    folder, short_dirs = tmp_path / "home", tmp_path / "sockets"
    data = DataFolder(folder / ".macfabric")
    data.path.mkdir(parents=True)
    make_keys(data.path)
    data.create()
    with data.claimed():
        pass
    for name in ("nodes/node-a/identity", "logs/router.jsonl", "hf/cache", "cluster/keys/ca.pem"):
        write(data.path / name)
    for name in ("app/router/x.py", "venv/bin/python", "keys/cluster.key", "serve.pid"):
        write(folder / "macfabric" / name)
    for name in (".ssh/macfabric", ".ssh/macfabric.pub", ".ssh/id_ed25519", "thesis.txt"):
        write(folder / name)
    write(folder / "ray_bootstrap_key.pem")
    write(short_dirs / "macfabric-ray-1/socket")
    write(short_dirs / "macfabric-demo-1/logs/up.log")
    prefix = tmp_path / "checkout/.venv"
    write(prefix / "compiled/x.pyc")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("MACFABRIC_DATA", raising=False)
    monkeypatch.setattr(uninstall, "_TEMPORARY", short_dirs)
    monkeypatch.setattr(uninstall, "compiled_files", lambda: [prefix / "compiled"])
    return folder


@pytest.fixture
def run_here(run, home, monkeypatch):
    """Run the command on the home's own data folder."""
    monkeypatch.delenv("MACFABRIC_DATA", raising=False)
    return lambda *argv: run("uninstall", *argv)


def write(path: Path, text: str = "content") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_everything_of_macfabric_is_removed_and_nothing_else(run_here, home):
    before = tree(home.parent)
    status, out, _ = run_here("--json")
    listing = json.loads(out)
    assert (status, listing["removed"], tree(home.parent)) == (0, [], before)

    status, out, err = run_here("--yes")
    assert (status, err) == (0, "")
    assert tree(home) == [".ssh", ".ssh/id_ed25519", "thesis.txt"]
    assert tree(home.parent / "checkout") == [".venv"]
    assert tree(home.parent / "sockets") == []
    for row in listing["found"]:
        assert row["path"] in out
    assert f"remains: the program: rm -r {Path(uninstall.__file__).parents[2]}" in out
    status, out, _ = run_here("--yes", "--json")
    assert (status, json.loads(out)["found"]) == (0, [])


def test_every_path_of_a_data_folder_is_removed(run_here, home):
    data = DataFolder(home / ".macfabric")
    paths = [
        getattr(data, name) for name, kind in vars(DataFolder).items() if isinstance(kind, property)
    ]
    for path in paths:
        if isinstance(path, Path) and not path.exists():
            write(path)

    assert run_here("--yes")[0] == 0
    assert not data.path.exists()


def test_agents_and_their_keys_are_kept_on_request(run_here, home):
    status, out, _ = run_here("--yes", "--keep-agents", "--json")
    report = json.loads(out)
    assert status == 0
    left = tree(home / ".macfabric")
    assert {"cluster.key", "authority.key", "nodes/node-a/identity", "cluster/keys/ca.pem"} < set(
        left
    )
    assert not {"logs", "hf", "lock"} & set(left)
    assert tree(home / "macfabric") == ["keys", "keys/cluster.key"]
    assert any("stored agents in" in line for line in report["remaining"])


@pytest.mark.parametrize(("typed", "goes"), [("uninstall\n", True), ("yes\n", False), ("", False)])
def test_confirmation_must_be_typed_on_a_terminal(run_here, home, monkeypatch, typed, goes):
    monkeypatch.setattr(sys, "stdin", Keyboard(typed))
    status, out, err = run_here()
    assert status == (0 if goes else 1)
    assert "Type uninstall" in err
    assert "To be removed" in out or "stored agents" in out
    assert (home / ".macfabric").exists() is not goes


def test_without_terminal_and_yes_nothing_is_removed(run_here, home, monkeypatch):
    before = tree(home)
    monkeypatch.setattr(sys, "stdin", io.StringIO("uninstall\n"))
    status, _, err = run_here()
    assert (status, "--yes" in err, tree(home)) == (2, True, before)


def test_links_are_removed_and_never_followed(run_here, home, tmp_path):
    outside = tmp_path / "outside"
    for name in ("agents/block", "logs/log", "deep/file"):
        write(outside / name)
    data = home / ".macfabric"
    (data / "nodes/node-b").symlink_to(outside / "agents")
    (data / "nodes/node-a/link").symlink_to(outside / "deep")
    (data / "runs").symlink_to(outside / "logs")
    before = tree(outside)
    status, out, _ = run_here("--yes")

    assert status == 0
    assert tree(outside) == before
    assert not data.exists()
    assert f"{outside / 'logs'}" not in out or "a link; only it is removed" in out


def test_data_folder_that_is_a_link_is_left_alone(run_here, home, tmp_path):
    (home / ".macfabric").rename(tmp_path / "drive")
    (home / ".macfabric").symlink_to(tmp_path / "drive")
    before = tree(tmp_path / "drive")
    status, out, _ = run_here("--yes")
    assert status == 0
    assert [name for name in before if not name.startswith("cluster")] == [
        name for name in tree(tmp_path / "drive") if not name.startswith("cluster")
    ]
    assert f": a link to {tmp_path / 'drive'}, which is kept" in out


@pytest.mark.parametrize("where", [".", "documents"])
def test_folders_that_are_no_fabric_data_are_left_alone(run_here, home, where):
    for name in ("logs/mine", "tmp/mine", "lock", "cluster.key"):
        write(home / where / name)
    status, out, _ = run_here("--yes", "--data", str(home / where))
    assert status == 0
    assert {f"{name}" for name in ("logs/mine", "tmp/mine", "lock")} <= set(tree(home / where))
    assert "does not look like the data of a fabric" in out


def test_unknown_files_in_the_data_folder_stay_and_are_named(run_here, home):
    write(home / ".macfabric/notes.txt")
    status, out, _ = run_here("--yes")
    assert (status, tree(home / ".macfabric")) == (0, ["notes.txt"])
    assert "not written by macfabric: notes.txt" in out


def test_checkout_in_the_home_is_not_taken_for_a_member(run_here, home):
    write(home / "macfabric/.git/HEAD")
    write(home / "macfabric/router/cli/main.py")
    assert run_here("--yes")[0] == 0
    left = tree(home / "macfabric")
    assert {".git/HEAD", "router/cli/main.py"} < set(left)
    assert not [name for name in left if name.startswith(("app", "venv", "keys"))]


def test_running_fabric_is_refused(run_here, home):
    data = DataFolder(home / ".macfabric")
    before = tree(home)
    with data.claimed():
        status, _, err = run_here("--yes")
    assert (status, "is running" in err, tree(home)) == (1, True, before)
    data.write_run(identify(os.getpid()), {})
    status, _, err = run_here("--yes")
    assert (status, "macfabric down" in err) == (1, True)
    data.run.unlink()
    member = [sys.executable, "-c", "input()", f"{home}/macfabric/ray/session"]
    voter = [sys.executable, "-c", "input()", "--data-dir", str(data.path)]
    for argv in (member, voter):
        with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
            status, _, err = run_here("--yes")
            process.communicate(b"\n")
        assert (status, "Stop it first" in err) == (1, True), err
    assert (home / ".macfabric/cluster.key").exists()
    assert run_here("--yes")[0] == 0


def test_sockets_of_another_running_fabric_stay(run_here, home):
    sockets = home.parent / "sockets/macfabric-ray-1"
    argv = [sys.executable, "-c", "input()", f"--temp-dir={sockets}/n0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        assert run_here("--yes")[0] == 0
        process.communicate(b"\n")
    assert sockets.exists()


def test_units_are_ended_and_removed_first(run_here, home, run, monkeypatch, tmp_path):
    write(tmp_path / "bin/systemctl", f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    (tmp_path / "bin/systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    argv = ("service", "install", "voter", "--kind", "systemd", "--no-start")
    assert run(*argv)[0] == 0
    status, out, _ = run_here("--yes", "--json")
    assert status == 0
    assert json.loads(out)["removed"][0].endswith("macfabric-voter.service")
    assert (tmp_path / "calls").read_text() == "--user disable --now macfabric-voter.service\n"


def test_file_that_cannot_be_removed_is_reported(run_here, home, monkeypatch):
    removed = uninstall.remove

    def refusing(leftover):
        if leftover.path.name == "logs":
            raise PermissionError(13, "Permission denied", str(leftover.path))
        removed(leftover)

    monkeypatch.setattr(uninstall, "remove", refusing)
    status, out, _ = run_here("--yes", "--json")
    report = json.loads(out)
    assert status == 1
    assert list(report["failed"]) == [str(home / ".macfabric/logs")]
    assert "permission denied" in report["failed"][str(home / ".macfabric/logs")]
    assert (home / ".macfabric/logs").exists()


def test_environment_behind_a_link_keeps_its_compiled_files(monkeypatch, tmp_path):
    write(tmp_path / "real/compiled/x.pyc")
    (tmp_path / ".venv").symlink_to(tmp_path / "real")
    monkeypatch.setattr(uninstall, "_source", lambda: tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert uninstall.compiled_files() == []
    (tmp_path / ".venv").unlink()
    (tmp_path / "real").rename(tmp_path / ".venv")
    assert uninstall.compiled_files()[0] == tmp_path / ".venv/compiled"

"""`macfabric hibernate` and `resume` on a whole fabric."""

import json
import stat
from pathlib import Path

import pytest

from router.cli.main import main
from tests.support.local_fabric import local_fabric
from tests.support.tiny_models import LLAMA, write_model
from tests.support.typed import type_words

SYSTEM = {"role": "system", "content": "the cat sat on the mat and the dog sat on the log. " * 30}
HELLO = [SYSTEM, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    model = str(write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA))
    with local_fabric(tmp_path_factory.mktemp("fabric"), model, "left", "right") as instance:
        yield instance


@pytest.fixture
def run(fabric, capsys, monkeypatch):
    """Run a command against the fabric; return its exit status, output and error output."""
    monkeypatch.delenv("MACFABRIC_API_KEY", raising=False)

    def call(*argv) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([*map(str, argv), "--url", fabric.url])
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_agent_survives_hibernation_and_resume(fabric, run, tmp_path):
    """An agent is written to a file, erased and resumed; its next turn recomputes nothing."""
    first = fabric.chat(HELLO, "alice", max_tokens=4)
    again = [
        *HELLO,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "go on"},
    ]
    file = tmp_path / "alice.mfa"
    status, out, err = run("hibernate", "alice", file, "--no-keep")
    assert (status, err) == (0, "")
    assert "was erased here" in out
    assert fabric.http.get("/v1/agents/alice").status_code == 404
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert names(tmp_path) == ["alice.mfa"]

    status, out, err = run("resume", file, "--node", "right", "--json")
    assert (status, err) == (0, "")
    receipt = json.loads(out)
    assert (receipt["id"], receipt["node"]) == ("alice", "right")
    assert receipt["epoch"] > 2  # above the erased epoch
    fabric.restart("right")
    back = fabric.chat(again, "alice", max_tokens=4)

    assert (back.node, back.cache, back.match) == ("right", "disk", "extend")
    assert back.epoch == receipt["epoch"]
    assert back.cached_tokens >= first.prompt_tokens


def test_key_file_makes_hibernation_file_portable(fabric, run, tmp_path):
    fabric.chat(HELLO, "bob", max_tokens=4)
    key, wrong, file = tmp_path / "key", tmp_path / "wrong", tmp_path / "bob.mfa"
    for path, text in ((key, "correct horse battery staple\n"), (wrong, "x" * 20)):
        path.write_text(text)
        path.chmod(0o600)
    status, out, _ = run("hibernate", "bob", file, "--key-file", key, "--json")
    receipt = json.loads(out)
    assert (status, receipt["kept"], receipt["signed_with"]) == (0, True, "key")
    assert receipt["bytes"] == file.stat().st_size
    assert b"horse" not in file.read_bytes()

    assert run("resume", file, "--as", "rob", "--key-file", key)[0] == 0
    assert fabric.chat(HELLO, "rob", max_tokens=1).cache == "disk"
    for extra, status, why in (
        ([], 2, "--key-file"),
        (["--key-file", wrong], 1, "another key"),
        (["--key-file", tmp_path / "none"], 2, "No such file"),
    ):
        exit_status, _, err = run("resume", file, "--as", "tom", *extra)
        assert (exit_status, why in err) == (status, True), err
    key.chmod(0o644)
    assert "chmod 600" in run("resume", file, "--key-file", key)[2]


def test_refusals_are_explained(fabric, run, tmp_path, monkeypatch):
    fabric.chat(HELLO, "carol", max_tokens=4)
    file, cut, other = tmp_path / "carol.mfa", tmp_path / "cut.mfa", tmp_path / "other"
    assert run("hibernate", "carol", file)[0] == 0
    cut.write_bytes(file.read_bytes()[:-40])
    other.write_bytes(b"something else")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    cases = [
        (("hibernate", "carol", file), 2, "--force"),
        (("hibernate", "nobody", tmp_path / "x"), 1, "no agent is called 'nobody'"),
        (("hibernate", "carol", tmp_path / "no" / "x"), 2, "No such file"),
        (("resume", file), 1, "called 'carol' already; use --replace, or --as"),
        (("resume", file, "--as", "a b"), 1, "agent id must be"),
        (("resume", file, "--as", "eve", "--node", "nowhere"), 1, "known: left, right"),
        (("resume", cut, "--as", "eve"), 1, "cut short"),
        (("resume", other), 1, "not a hibernation file"),
        (("resume", tmp_path / "none"), 2, "No such file"),
    ]
    for argv, status, why in cases:
        exit_status, out, err = run(*argv)
        assert (exit_status, out, why in err) == (status, "", True), (argv, err)
    file.write_bytes(damaged)
    assert "damaged" in run("resume", file, "--as", "eve")[2]
    assert run("hibernate", "carol", file, "--force")[0] == 0
    with monkeypatch.context() as terminal:
        type_words(terminal, "no\n")
        before = fabric.http.get("/v1/agents/carol").json()["epoch"]
        status, _, err = run("resume", file, "--replace")
        assert (status, "replace carol" in err) == (1, True)
        assert fabric.http.get("/v1/agents/carol").json()["epoch"] == before
    assert run("resume", file, "--replace")[0] == 0
    assert names(tmp_path) == [
        "carol.mfa",
        "cut.mfa",
        "other",
    ]
    assert fabric.http.get("/v1/agents/eve").status_code == 404


def test_incomplete_hibernation_file_is_not_kept(fabric, run, tmp_path):
    fabric.chat(HELLO, "dave", max_tokens=4)
    owner = fabric.services[fabric.chat(HELLO, "dave", max_tokens=4).node]
    agent = next(a for a in owner.node.resources.table if a.manifest.agent == "dave")
    victim = owner._disk.root / "blocks" / f"{agent.saved.refs[-1].name}.full"
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    status, out, err = run("hibernate", "dave", tmp_path / "dave.mfa", "--no-keep")

    assert (status, out) == (1, "")
    assert "the agent is unchanged" in err
    assert names(tmp_path) == []
    assert fabric.http.get("/v1/agents/dave").status_code == 200

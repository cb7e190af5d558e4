"""`macfabric backup` and `restore` on a whole fabric, as an operator sees them."""

import json
import stat

import pytest

from router.cli.backup import tenants
from router.cli.main import main
from tests.support.keys import make_keys
from tests.support.local_fabric import OPERATOR_KEY, local_fabric
from tests.support.tiny_models import LLAMA, write_model
from tests.support.typed import type_words

WORDS = "the cat sat on the mat and the dog sat on the log. " * 30


def conversation(name):
    return [{"role": "user", "content": f"{name} says: {WORDS}"}]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    model = str(write_model(tmp_path_factory.mktemp("models") / "llama", LLAMA))
    with local_fabric(tmp_path_factory.mktemp("fabric"), model, "left", "right") as instance:
        yield instance


@pytest.fixture
def agents(fabric):
    """Create two agents with a team's name and one without, and erase all others."""
    for row in fabric.http.get("/v1/agents").json()["data"]:
        fabric.http.delete(f"/v1/agents/{row['id']}")
    for name in ("team-1", "team-2", "solo"):
        fabric.chat(conversation(name), name, max_tokens=4)
    return fabric


@pytest.fixture
def run(fabric, capsys, monkeypatch, tmp_path):
    """Run a command against the fabric; return its exit status, output and error output."""
    monkeypatch.delenv("MACFABRIC_API_KEY", raising=False)
    monkeypatch.setenv("MACFABRIC_OPERATOR_KEY", OPERATOR_KEY)
    keys = tmp_path / "keys"
    keys.mkdir()
    make_keys(keys)

    def call(command, folder, *argv, json_too=False):
        capsys.readouterr()
        options = ["--json"] if json_too else []
        if command == "backup":
            options += ["--keys", str(keys)]
        options += ["--data", str(tmp_path / "data")]
        argv = [command, str(folder), *map(str, argv), *options]
        try:
            status = main([*argv, "--url", fabric.url])
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, json.loads(printed.out) if json_too else printed.out, printed.err

    return call


def results(report):
    return {row["id"]: row["result"] for row in report["agents"]}


def test_agents_survive_erasure_through_a_backup(agents, run, tmp_path):
    folder = tmp_path / "backup"
    first = agents.chat(conversation("solo"), "solo", max_tokens=4)
    status, report, err = run("backup", folder, json_too=True)
    assert (status, err, report["ok"]) == (0, "", True)
    assert results(report) == dict.fromkeys(("solo", "team-1", "team-2"), "saved")
    assert report["keys"] == ["authority.key", "ca.pem", "cluster.key"]
    assert report["counts"] == {"saved": 3}
    for path in folder.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600)
        assert "solo" not in path.name
    assert not list(folder.rglob("*.part"))
    status, out, _ = run("restore", folder, "--check")
    assert (status, out.count("sound")) == (0, 4)

    agents.http.delete("/v1/agents/solo")
    status, out, err = run("restore", folder, "--node", "right")
    assert (status, err) == (0, "")
    assert "restored  solo" in out
    assert "skipped   team-1" in out
    again = agents.chat(conversation("solo"), "solo", max_tokens=4)
    assert (again.node, again.cache) == ("right", "disk")
    assert again.cached_tokens >= first.prompt_tokens - 1


def test_second_backup_saves_only_changes(agents, run, tmp_path):
    folder = tmp_path / "backup"
    assert run("backup", folder, "--agents", "team-*")[0] == 0
    answer = agents.chat(conversation("team-1"), "team-1", max_tokens=4)
    more = [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "go on"}]
    agents.chat(conversation("team-1") + more, "team-1", max_tokens=4)
    status, report, _ = run("backup", folder, json_too=True)
    assert status == 0
    assert results(report) == {"solo": "saved", "team-1": "saved", "team-2": "kept"}

    # A lost file is saved again, and the file of an agent that no longer exists is kept.
    agents.http.delete("/v1/agents/solo")
    listed = json.loads((folder / "backup.json").read_text())["agents"]
    lost = next(row["file"] for row in listed if row["id"] == "team-2")
    (folder / "agents" / lost).unlink()
    status, report, _ = run("backup", folder, json_too=True)
    assert results(report) == {"team-1": "kept", "team-2": "saved"}
    assert (report["kept_of_before"], report["agents_in_backup"]) == (1, 3)


def test_interrupted_backup_is_continued(agents, run, tmp_path, monkeypatch):
    folder, saved = tmp_path / "backup", []

    def interrupted(action):
        if saved:
            raise KeyboardInterrupt
        saved.append(action())
        return saved[0]

    with monkeypatch.context() as patch:
        patch.setattr("router.cli.backup.backup.retry_refused", interrupted)
        assert run("backup", folder)[0] == 130
    status, out, _ = run("restore", folder, "--check")
    assert (status, out.count("sound")) == (0, 2)
    assert "was interrupted" in out
    status, report, _ = run("backup", folder, json_too=True)
    assert status == 0
    assert report["counts"] == {"kept": 1, "saved": 2}
    assert "was interrupted" not in run("restore", folder, "--check")[1]


def test_damaged_agent_fails_alone_with_its_reason(agents, run, tmp_path):
    folder = tmp_path / "backup"
    node = agents.http.get("/v1/agents/solo").json()["owner"]
    owner = agents.services[node]
    agent = next(a for a in owner.node.resources.table if a.manifest.agent == "solo")
    victim = owner._disk.root / "blocks" / f"{agent.saved.refs[-1].name}.full"
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    status, report, _ = run("backup", folder, json_too=True)

    assert (status, report["ok"]) == (1, False)
    assert results(report) == {"solo": "failed", "team-1": "saved", "team-2": "saved"}
    [failed] = [row for row in report["agents"] if row["result"] == "failed"]
    assert failed["why"]
    assert json.loads((folder / "backup.json").read_text())["failed_count"] == 1


def test_restore_replaces_agents_only_after_confirmation(agents, run, tmp_path, monkeypatch):
    folder = tmp_path / "backup"
    assert run("backup", folder, "--agents", "team-*")[0] == 0
    type_words(monkeypatch, "no\nyes\n")
    for status in (1, 0):
        before = agents.http.get("/v1/agents/team-1").json()["epoch"]
        answer = run("restore", folder, "--existing", "replace")
        assert (answer[0], "replace those of 2 agents" in answer[2]) == (status, True)
        now = agents.http.get("/v1/agents/team-1").json()["epoch"]
        assert (now == before) == (status == 1)
    assert run("restore", folder)[0] == 0, "a restore that replaces no agent needs no confirmation"


def test_file_that_changed_in_the_backup_is_not_restored(agents, run, tmp_path):
    folder = tmp_path / "backup"
    assert run("backup", folder)[0] == 0
    victim = next((folder / "agents").iterdir())
    raw = bytearray(victim.read_bytes())
    raw[len(raw) // 2] ^= 1
    victim.write_bytes(raw)
    status, report, _ = run("restore", folder, "--existing", "replace", json_too=True)
    assert status == 1
    assert report["counts"] == {"damaged": 1, "restored": 2}
    assert "checksum" in next(r["why"] for r in report["agents"] if r["result"] == "damaged")
    assert run("restore", folder, "--check")[0] == 1


def test_key_file_encrypts_keys_and_is_needed_again(agents, run, tmp_path):
    folder, key_file = tmp_path / "backup", tmp_path / "passphrase"
    key_file.write_text("correct horse battery staple")
    key_file.chmod(0o600)
    status, out, _ = run("backup", folder, "--agents", "solo", "--key-file", key_file)
    assert status == 0
    assert f"without {key_file} nothing here can be restored" in out
    for command in ("backup", "restore"):
        status, _, err = run(command, folder)
        assert (status, "--key-file" in err) == (2, True)
    agents.http.delete("/v1/agents/solo")
    assert run("restore", folder, "--key-file", key_file)[0] == 0
    assert agents.http.get("/v1/agents/solo").status_code == 200
    # The keys, into a new data folder.
    target = tmp_path / "new"
    argv = ("--key-file", key_file, "--keys-to", target)
    status, report, _ = run("restore", folder, *argv, json_too=True)
    assert (status, report["written"]) == (0, ["cluster.key", "ca.pem", "authority.key"])
    kept = (tmp_path / "keys/cluster.key").read_text()
    assert (target / "cluster.key").read_text() == kept
    (target / "cluster.key").write_text("another")
    assert run("restore", folder, *argv)[0] == 2
    assert (target / "cluster.key").read_text() == "another"


def test_wrong_uses_are_explained(agents, run, tmp_path):
    used = tmp_path / "used"
    used.mkdir()
    (used / "thesis.txt").write_text("mine")
    cases = [
        (("backup", used), 2, "nor a backup"),
        (("restore", used), 2, "not a backup"),
        (("backup", tmp_path / "b", "--api-keys", tmp_path / "none"), 2, "no such file"),
        (("restore", tmp_path / "none"), 2, "not a backup"),
    ]
    for argv, status, why in cases:
        exit_status, _, err = run(*argv)
        assert (exit_status, why in err.lower()) == (status, True), err
    assert run("backup", tmp_path / "few", "--agents", "absent-*")[0] == 0


def test_temporary_refusals_are_repeated():
    waited, answers = [], ["busy", "busy", "done"]

    def action():
        answer = answers.pop(0)
        if answer == "busy":
            raise tenants.RefusedError(answer, 503, {}, 3.0)
        return answer

    assert tenants.retry_refused(action, waited.append) == "done"
    assert waited == [3.0, 3.0]
    answers[:] = ["busy"] * 9
    with pytest.raises(tenants.RefusedError):
        tenants.retry_refused(action, waited.append)

"""`down --config`: calls to each Mac, and reports of those that do not answer."""

import json
import os

import pytest
import yaml

from router.cli import cluster_down

CLUSTER = {
    "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]},
    "auth": {"ssh_user": "mac", "ssh_private_key": "~/key"},
    "metadata": {"macfabric": {"data_dir": "~/my data"}},
}
# Records its arguments; the Mac named in the file `gone` is unreachable.
SSH = """\
#!/bin/sh
printf '%s\\n' "$*" >> "$HOME/calls"
[ ! -e "$HOME/gone" ] || ! echo "$*" | grep -q "$(cat "$HOME/gone")" || {
echo "ssh: connect to host: No route to host" >&2; exit 255; }
[ ! -e "$HOME/progress" ] || ! echo "$*" | grep -q "macfabric down" || {
cat "$HOME/progress" >&2; exit $(cat "$HOME/status"); }
"""
PROGRESS = """\
{"event": "asked", "pid": 7, "wait_s": 30.0}
{"event": "draining", "turns": 2, "left_s": 29.0}
{"event": "draining", "turns": "\\u001b[2J", "left_s": 28.0}
{"event": "saving", "more": "\\u001b[2J"}
{"event": "unheard of"}
["no row"]
macfabric: something else
"""


@pytest.fixture
def laptop(tmp_path, monkeypatch):
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return tmp_path


def test_down_saves_nodes_before_stopping_ray(laptop, run):
    status, out, _ = run("down", "--config", str(laptop / "cluster.yaml"), "--json")
    first, *others = (laptop / "calls").read_text().splitlines()

    assert status == 0
    assert [row["ok"] for row in json.loads(out)["macs"]] == [True, True, True]
    head_call = "mac@10.0.0.1 ~/macfabric/venv/bin/macfabric down --json --data ~/'my data'"
    assert first.endswith(head_call)
    assert f"-i {laptop}/key" in first
    assert "BatchMode=yes" in first
    assert sorted(call.split(" -- ")[1] for call in others) == [
        f"mac@10.0.0.{n} ~/macfabric/venv/bin/ray stop" for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("gone", ["10.0.0.1", "10.0.0.3"])
def test_unreachable_mac_is_reported_and_others_stop(laptop, run, gone):
    (laptop / "gone").write_text(gone)
    status, out, _ = run("down", "--config", str(laptop / "cluster.yaml"))
    lines = {line.split()[0]: line for line in out.splitlines()[1:]}

    assert status == 1
    assert "No route to host" in lines.pop(gone)
    assert all("stopped" in line for line in lines.values())
    assert len((laptop / "calls").read_text().splitlines()) == 4


@pytest.mark.parametrize("status", [0, 1])
def test_head_progress_is_shown_in_words(laptop, run, status):
    (laptop / "progress").write_text(PROGRESS)
    (laptop / "status").write_text(str(status))
    exit_status, out, error = run("down", "--config", str(laptop / "cluster.yaml"))

    assert exit_status == status
    assert "10.0.0.1: asking process 7 to stop; turns get 30 s to end" in error
    assert "10.0.0.1: waiting for running turns: 2, up to 29 s" in error
    assert "10.0.0.1: stopping the nodes; agents in memory are saved first" in error
    assert "28 s" not in error
    assert "\x1b" not in error
    assert "unheard of" not in error
    assert ("its router did not stop: something else" in " ".join(out.split())) == (status == 1)


def test_head_progress_is_one_json_object_per_line(laptop, run):
    (laptop / "progress").write_text(PROGRESS)
    (laptop / "status").write_text("0")
    _, out, error = run("down", "--config", str(laptop / "cluster.yaml"), "--json")

    assert json.loads(out)["ok"]
    assert [json.loads(line) for line in error.splitlines()] == [
        {"host": "10.0.0.1", "event": "asked", "pid": 7, "wait_s": 30.0},
        {"host": "10.0.0.1", "event": "draining", "turns": 2, "left_s": 29.0},
        {"host": "10.0.0.1", "event": "saving"},
    ]


def test_unresponsive_head_times_out(laptop, run, monkeypatch):
    (laptop / "bin" / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(cluster_down, "STOP_TIMEOUT_S", 0.5)
    status, out, _ = run("down", "--config", str(laptop / "cluster.yaml"), "--wait", "0")
    assert status == 1
    assert out.count("no answer within 0.5 s") == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c.pop("provider"),
        lambda c: c["provider"].update(worker_ips="10.0.0.2"),
        lambda c: c["provider"].update(head_ip=7),
        lambda c: c.pop("auth"),
        lambda c: c["metadata"]["macfabric"].update(modle="x"),
    ],
)
def test_file_without_macs_is_misuse(laptop, run, spoil):
    config = json.loads(json.dumps(CLUSTER))
    spoil(config)
    (laptop / "cluster.yaml").write_text(yaml.safe_dump(config))

    status, _, error = run("down", "--config", str(laptop / "cluster.yaml"))
    assert status == 2
    assert "cluster.yaml" in error
    assert not (laptop / "calls").exists()


def test_folder_and_file_together_are_misuse(laptop, run):
    assert run("down", "--config", "x", "--data", "y")[0] == 2

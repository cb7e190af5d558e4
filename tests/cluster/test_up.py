"""`macfabric up` with a real node and router: it serves, keeps caches, and leaves no process."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from router.cli.data_folder import DataFolder
from router.supervise.processes import ProcessId, descendants, identify, wait_for_exit
from tests.cluster.conftest import ROOT
from tests.support.tiny_models import LLAMA, write_model

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SLEEP = "import time; time.sleep(60)"
PROXY = "http://127.0.0.1:9"  # no server listens there; no process of a fabric may use this proxy
PROXIES = {
    spelled: PROXY
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    for spelled in (name, name.upper())
}


class Up:
    """A `macfabric up` and its processes."""

    def __init__(self, data: Path, model: Path, home: Path) -> None:
        self.folder = DataFolder(data)
        self.environment = os.environ | PROXIES | {"PYTHONPATH": str(ROOT), "HOME": str(home)}
        for name in ("no_proxy", "NO_PROXY"):
            self.environment.pop(name, None)
        self.log = home.parent / "up.log"
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                self._argv("up", "--port", "0", "--model", str(model), "--json"),
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        self.ready = json.loads(line)
        self.owned = descendants([self.popen.pid])

    def _argv(self, command: str, *options: str) -> list[str]:
        main = [sys.executable, "-m", "router.cli.main", command]
        return [*main, "--data", str(self.folder.path), *options]

    def run(self, command: str, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(command, *options),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def chat(self, agent: str, *texts: str) -> tuple[str, dict]:
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]
        body = {"model": self.ready["model"].rpartition("/")[2], "messages": messages}
        request = urllib.request.Request(
            self.ready["url"] + "/v1/chat/completions",
            json.dumps(body | {"max_tokens": 4, "temperature": 0}).encode(),
            {"content-type": "application/json", "x-agent-id": agent},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.loads(response.read())["choices"][0]["message"]["content"]
            return answer, dict(response.headers)

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.popen.stdout.close()
        assert wait_for_exit(self.owned, 30.0) == []


@pytest.fixture
def up(tmp_path):
    model = write_model(tmp_path / "tiny", LLAMA | {"num_hidden_layers": 2})
    (tmp_path / "home").mkdir()
    started = []

    def start() -> Up:
        started.append(Up(tmp_path / "data", model, tmp_path / "home"))
        return started[-1]

    yield start
    for one in started:
        one.close()


def accessible_to_others(data):
    """List files that other users may access; Ray's own folders are exempt."""
    found = [path for path in [data, *data.rglob("*")] if not path.is_symlink()]
    rays = data / "ray"
    return [
        path
        for path in found
        if path.lstat().st_mode & 0o077
        and not (path.is_relative_to(rays) and path != rays)
        and not path.is_socket()
    ]


def test_fabric_serves_keeps_caches_and_stops_without_leftovers(up, tmp_path):
    first = up()
    print(f"`up` was ready after {first.ready['seconds']} s: {first.ready['phases']}")
    answer, headers = first.chat("mira", "the cat sat on the mat")
    second = first.run("up", "--port", "0")
    status = json.loads(first.run("status", "--json").stdout)
    readable = accessible_to_others(tmp_path / "data")
    down = first.run("down", "--json")

    assert readable == []
    assert accessible_to_others(tmp_path / "data") == []
    assert headers["x-macfabric-cache"] == "cold"
    assert status["agents"] == 1
    assert second.returncode == 1
    assert "A fabric is running in" in second.stderr
    assert json.loads(down.stdout)["was"] == "running"
    shown = [json.loads(line)["event"] for line in down.stderr.splitlines()]
    assert shown[0] == "asked"
    assert set(shown) <= {"asked", "stopping", "draining", "saving", "stopping_ray"}
    assert first.popen.wait(60) == 0
    assert wait_for_exit(first.owned, 5.0) == []
    assert not first.folder.endpoint.exists()
    assert not first.folder.run.exists()
    assert list((tmp_path / "home").iterdir()) == []
    assert first.run("status").returncode == 1

    again = up()
    assert (
        again.chat("mira", "the cat sat on the mat", answer, "and?")[1]["x-macfabric-cache"]
        == "disk"
    )

    # A crash: the supervisor is killed.
    again.popen.send_signal(signal.SIGKILL)

    assert wait_for_exit(again.owned, 30.0) == []
    assert json.loads(again.run("down", "--json").stdout)["was"] in ("crashed", "not running")


@pytest.mark.nightly
def test_node_that_cannot_restart_reports_why_and_recovers_once_fixed(up, tmp_path):
    first = up()
    answer, _ = first.chat("mira", "the cat sat on the mat")
    model, away = tmp_path / "tiny", tmp_path / "away"
    model.rename(away)
    [node] = json.loads(first.run("nodes", "--json").stdout)
    os.kill(node["pid"], signal.SIGKILL)
    status = await_output(lambda: first.run("status").stdout, "node-a failed: ")
    away.rename(model)
    again = await_output(lambda: first.run("nodes").stdout, " ready ")

    assert str(model) in status
    assert "; next start in " in status
    assert "node-a failed: " in first.log.read_text()
    assert "; next start in " in first.log.read_text()
    assert "node-a" in again
    reply = first.chat("mira", "the cat sat on the mat", answer, "and?")
    assert reply[1]["x-macfabric-cache"] == "disk"


def await_output(read_output, expected: str) -> str:
    """Poll until the output has the expected text; return it."""
    deadline_s = time.monotonic() + 90.0
    while expected not in (text := read_output()):
        assert time.monotonic() < deadline_s, text
        time.sleep(0.2)
    return text


def test_down_stops_processes_left_by_a_crash(tmp_path):
    """This includes a killed keeper; processes that reuse a recorded pid keep running."""
    folder = DataFolder(tmp_path)
    folder.create()
    orphan = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    try:
        recorded = {"router": identify(orphan.pid), "nodes": ProcessId(stranger.pid, "long ago")}
        folder.write_run(ProcessId(2**22 + 1, "never"), recorded)
        began_s = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "router.cli.main", "down", "--data", str(tmp_path), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

        assert json.loads(done.stdout) == {"was": "crashed", "ended": 1, "data": str(tmp_path)}
        assert orphan.wait(60) == -signal.SIGTERM
        assert stranger.poll() is None
        assert time.monotonic() - began_s < 25
    finally:
        for popen in (orphan, stranger):
            popen.kill()
            popen.wait()

"""Two routers on a real Ray cluster, set up as in docs/standby.md: one takes over from the other.

First the active router's process is lost, then the whole Mac with Ray's head: its supervisor,
router, node and Ray. Times are printed and not asserted, as many processes share this machine.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

import httpx2
import pytest
import yaml

from fabric.keys import OPERATOR_HEADER
from router.supervise.processes import descendants, is_alive, wait_for_exit
from tests.cluster.conftest import NAMES, start_ray
from tests.cluster.ray_fabric import command
from tests.support.tiny_models import LLAMA, write_model

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="finds Ray's processes in /proc"
    ),
]
START_S, HANG_S, POLL_S = 300.0, 120.0, 0.1
STORY = "the cat sat on the mat and looked at the dog " * 40


class Command:
    """A running `macfabric` command and the URL of its router."""

    def __init__(self, ray, log, *words):
        self._log = log.open("w")
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "router.cli.main", *words],
            env=ray.environment,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        line = self._popen.stdout.readline()
        assert line, log.read_text()
        self.url = json.loads(line)["url"]

    def router(self):
        """Return the process of its router."""
        found = [p for p in self.processes() if "router --data-dir" in command(p)]
        return found[-1]

    def processes(self):
        return descendants([self._popen.pid])

    def kill(self):
        """Kill the command and all processes that it started."""
        owned = self.processes()
        self._popen.kill()
        for process in owned:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        self._close(owned)

    def close(self):
        if self._popen.poll() is None:
            owned = self.processes()
            self._popen.terminate()
            self._popen.wait(HANG_S)
            self._close(owned)

    def _close(self, owned):
        self._popen.wait(HANG_S)
        self._popen.stdout.close()
        self._log.close()
        assert wait_for_exit(owned, HANG_S) == []


class Fabric:
    """Three nodes on three Ray nodes, `macfabric serve` on the first, and a second router."""

    def __init__(self, folder, opened):
        self.folder = folder / "fabric"
        self.folder.mkdir()
        self.keeper, self.ray = start_ray(self.folder)
        opened.callback(self.keeper.close)
        opened.callback(self.ray.stop)
        model = write_model(folder / "tiny", LLAMA | {"num_hidden_layers": 2})
        hosts = [node.host for node in self.ray.nodes]
        provider = {"type": "local", "head_ip": hosts[0], "worker_ips": hosts[1:]}
        router = {"standby": True, "host": "127.0.0.1"}
        section = {"model": str(model), "keys_dir": str(self.folder), "router": router}
        self._config = folder / "cluster.yaml"
        self._config.write_text(
            yaml.safe_dump({"provider": provider, "metadata": {"macfabric": section}})
        )
        self._logs = folder
        self._opened = opened
        self.first = self._run("serve", self.folder)
        until(lambda: router_row(self.first)["role"] == "active")
        until(lambda: is_ready(self.first))
        self.second = self.start_second()

    def _run(self, name, data, *options):
        words = (*options, "--address", self.ray.address, "--config", str(self._config))
        words = (*words, "--data", str(data), "--port", "0", "--json")
        running = Command(self.ray, self._logs / f"{name}-{time.monotonic_ns()}.log", name, *words)
        self._opened.callback(running.close)
        return running

    def start_second(self):
        started = self._run("router", self._logs / "second", "--standby")
        until(lambda: router_row(started)["role"] == "standby")
        return started

    def kill_head_mac(self):
        """Kill all processes of the first Mac, as a power cut does."""
        self.first.kill()
        option = f"--temp-dir={self.ray.nodes[0].temp_dir} "
        tree = descendants([self.keeper.process.pid])
        roots = [process for process in tree if option in command(process)]
        lost = {*roots, *descendants([root.pid for root in roots])}
        assert any("gcs_server" in command(process) for process in lost)
        for process in lost:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert wait_for_exit([*lost], HANG_S) == []


@pytest.fixture
def fabric(tmp_path):
    with ExitStack() as opened:
        yield Fabric(tmp_path, opened)


def until(condition):
    end_s = time.monotonic() + START_S
    while True:
        with suppress(httpx2.HTTPError, KeyError):
            if condition():
                return
        assert time.monotonic() < end_s
        time.sleep(POLL_S)


def router_row(running):
    return httpx2.get(f"{running.url}/v1/router", timeout=HANG_S).json()


def is_ready(running):
    answer = httpx2.get(f"{running.url}/v1/nodes", timeout=HANG_S).json()
    return [row["name"] for row in answer["data"] if row["state"] == "ready"] == list(NAMES)


def ask(running, agent, text):
    """Repeat a turn until it is answered; return its headers and the seconds until then."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    began_s = time.monotonic()
    while True:
        with suppress(httpx2.HTTPError):
            answer = httpx2.post(
                f"{running.url}/v1/chat/completions",
                json=body,
                headers={"x-agent-id": agent},
                timeout=HANG_S,
            )
            if answer.status_code == 200:
                return answer.headers, time.monotonic() - began_s
            assert answer.status_code == 503, answer.text
        assert time.monotonic() - began_s < HANG_S
        time.sleep(POLL_S)


def owner_of(headers):
    return headers["x-macfabric-node"]


def roles(*routers):
    return [router_row(each)["role"] for each in routers]


def test_each_router_takes_over_from_the_other(fabric):
    first, second = fabric.first, fabric.second
    agents = {name: owner_of(ask(second, name, STORY)[0]) for name in ("anna", "bert", "cleo")}
    for name, node in zip(agents, NAMES, strict=True):
        if agents[name] != node:
            moved = httpx2.post(f"{first.url}/v1/agents/{name}/migrate", json={"to": node})
            assert moved.status_code == 200, moved.text
    terms = [router_row(first)["term"]]

    def check_kept(running, name, node):
        headers, seconds = ask(running, name, STORY)
        assert owner_of(headers) == node
        assert int(headers["x-macfabric-cached-tokens"]) > 0, "the agent lost its memory"
        return seconds

    os.kill(first.router().pid, signal.SIGKILL)
    seconds = check_kept(second, "anna", "node-a")
    print(f"\nthe active router killed: a new turn after {seconds:.1f} s")
    terms.append(router_row(second)["term"])
    until(lambda: roles(first, second) == ["standby", "active"])  # the supervisor restarts it
    check_kept(first, "bert", "node-b")

    second.kill()
    seconds = check_kept(first, "bert", "node-b")
    print(f"the second one killed: a new turn after {seconds:.1f} s")
    second = fabric.start_second()
    assert roles(first, second) == ["active", "standby"]
    terms.append(router_row(first)["term"])

    router = first.router()
    fabric.kill_head_mac()
    assert not is_alive(router)
    seconds = check_kept(second, "cleo", "node-c")
    print(f"the Mac with Ray's head lost: a new turn after {seconds:.1f} s")
    terms.append(router_row(second)["term"])
    headers, seconds = ask(second, "anna", STORY)
    print(f"its own agent answered on {owner_of(headers)} after {seconds:.1f} s")
    assert owner_of(headers) in NAMES[1:]
    assert roles(second) == ["active"]
    assert terms == sorted(set(terms)), "a takeover did not begin a later term"


def incarnations(fabric):
    key = (fabric.folder / "operator.key").read_text().strip()
    url = f"{fabric.first.url}/v1/nodes"
    rows = httpx2.get(url, headers={OPERATOR_HEADER: key}, timeout=HANG_S).json()["data"]
    return {row["name"]: row["incarnation"] for row in rows}


def test_upgrade_restarts_actors_and_hands_over_to_the_standby(fabric):
    ask(fabric.first, "mira", STORY)
    before = incarnations(fabric)
    argv = [sys.executable, "-m", "router.cli.main", "upgrade", "--force", "--json"]
    done = subprocess.run(
        [*argv, "--data", str(fabric.folder)],
        env=fabric.ray.environment,
        capture_output=True,
        text=True,
        timeout=3 * START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    until(lambda: router_row(fabric.first)["role"] == "standby")
    headers, _ = ask(fabric.first, "mira", f"{STORY} and then")
    after = incarnations(fabric)

    assert [row["result"] for row in results] == ["upgraded"] * len(NAMES) + ["upgraded"]
    assert router_row(fabric.second)["role"] == "active"
    assert all(after[name] != before[name] for name in NAMES)
    assert int(headers["x-macfabric-cached-tokens"]) > 0

"""A local Ray cluster starts, is isolated, and leaves no process or file when stopped or killed."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from router.supervise import ray_processes
from router.supervise.keeper import Keeper
from router.supervise.processes import descendants, identify, wait_for_exit
from router.supervise.ray_processes import (
    SOCKET_PATH_BYTES_MAX,
    LocalRay,
    free_port,
    loopback_hosts,
    ray_environment,
    trim_ray_start,
)
from tests.cluster.conftest import NAMES, ROOT, start_ray
from tests.support.keys import make_keys

KEYS = {"authority.key", "ca.pem", "cluster.key", "member.key", "member.pem"}
RAYLET_NOTICED_S = 60.0  # of the 600 that Ray waits for a dead raylet's report
LINUX = sys.platform.startswith("linux")
# Prints the nodes' addresses and labels, as a driver of the cluster.
DRIVER = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
for row in ray.nodes():
    print(row["NodeManagerAddress"], row["Labels"]["mac"], row["Resources"]["mlx"], row["Alive"])
"""
OWNER = """
import sys, time
from pathlib import Path
from tests.cluster.conftest import start_ray
keeper, ray = start_ray(Path(sys.argv[1]), ("node-a",))
print(keeper.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.nightly
def test_three_nodes_start_and_stop_without_leftovers(tmp_path):
    began_s = time.monotonic()
    keeper, ray = start_ray(tmp_path)
    try:
        seconds = time.monotonic() - began_s
        owned = [keeper.process, *descendants([keeper.process.pid])]
        driver_lines = subprocess.run(
            [sys.executable, "-c", DRIVER, ray.address],
            env=ray.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.splitlines()
        ray.stop()
    finally:
        keeper.close()
    print(f"three Ray nodes started in {seconds:.1f} s")

    assert sorted(line.split()[1:] for line in driver_lines) == [[n, "1.0", "True"] for n in NAMES]
    if LINUX:
        assert len({line.split()[0] for line in driver_lines}) == 3
    assert len(owned) >= 10
    assert wait_for_exit(owned, 5.0) == []
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"keeper.log", "logs"} | KEYS
    assert [path for path in (tmp_path / "logs").rglob("*") if path.stat().st_mode & 0o077] == []
    assert (tmp_path / "keeper.log").read_text() == ""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.nightly
def test_killed_owner_leaves_no_processes(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        keeper_pid = int(owner.stdout.readline())
        owned = [identify(keeper_pid), *descendants([keeper_pid])]
        assert len(owned) >= 6

        owner.kill()

        assert wait_for_exit(owned, 20.0) == []
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


@pytest.mark.cluster
@pytest.mark.slow
def test_killed_keeper_leaves_no_processes(tmp_path):
    keeper, ray = start_ray(tmp_path, ("node-a",))
    owned = descendants([keeper.process.pid])
    os.kill(keeper.process.pid, signal.SIGKILL)
    keeper.close()
    ray.remove_files()

    assert len(owned) >= 5
    assert wait_for_exit(owned, 5.0) == []


@pytest.fixture
def keeper(tmp_path):
    running_keeper = Keeper(tmp_path / "keeper.log")
    yield running_keeper
    running_keeper.close()


def test_every_local_node_has_an_address(tmp_path):
    hosts = loopback_hosts(3)

    assert all(host.startswith("127.0.0.") for host in hosts)
    assert len(set(hosts)) == (3 if LINUX else 1)


def test_ports_are_below_the_ephemeral_range():
    assert all(20_000 <= free_port("127.0.0.1") < 32_000 for _ in range(20))


def test_ray_token_is_private_and_fresh(tmp_path, keeper):
    LocalRay(tmp_path, NAMES, keeper)
    token = tmp_path / "ray.token"
    first = token.read_text()
    LocalRay(tmp_path, NAMES, keeper)

    assert token.stat().st_mode & 0o077 == 0
    assert len(first) == 64
    assert token.read_text() != first


def test_inherited_ray_variables_are_dropped(tmp_path):
    base = {"RAY_ADDRESS": "elsewhere:1", "RAY_TMPDIR": "/x", "HOME": "/h"}
    environment = ray_environment(tmp_path, base)

    assert "RAY_ADDRESS" not in environment
    assert "RAY_TMPDIR" not in environment
    assert environment["HOME"] == "/h"
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_ENABLE_AUTO_CONNECT"] == "0"
    assert environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "ray.token")
    assert environment["RAY_USE_TLS"] == "1"
    assert environment["RAY_worker_niceness"] == "0"
    assert environment["RAY_gcs_rpc_server_reconnect_timeout_s"] == "86400"
    assert environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


def test_long_folder_gets_a_short_socket_folder(tmp_path, keeper):
    folder = tmp_path / ("long" * 25)
    ray = LocalRay(folder, NAMES, keeper)
    try:
        assert ray.short_dir is not None
        assert ray.short_dir.stat().st_mode & 0o077 == 0
        socket = ray.nodes[0].temp_dir / "s1234567" / "sockets" / "plasma_store.1"
        assert len(str(socket)) <= SOCKET_PATH_BYTES_MAX
    finally:
        ray.remove_files()

    assert not ray.short_dir.exists()
    assert not (folder / "ray.token").exists()


def test_short_folder_holds_all_files(keeper):
    folder = Path("/tmp") / f"macfabric-test-{os.getpid()}"
    try:
        ray = LocalRay(folder, NAMES, keeper)
        assert ray.short_dir is None
        assert all(node.temp_dir.is_relative_to(folder) for node in ray.nodes)
    finally:
        shutil.rmtree(folder)


class Services:
    """Fake of Ray's module for `ray start`: the raylet registers at the third query."""

    def __init__(self):
        self.calls_count = 0

    def get_node(self, address, node_id):
        self.calls_count += 1
        if self.calls_count < 3:
            message = "not there yet"
            raise RuntimeError(message)
        return address, node_id


def exited_process(program):
    """Start a shell of this name that exits at once; do not wait for it."""
    child = subprocess.Popen([program, "-c", "exit 0"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return child


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="macOS before Python 3.13")
def test_starting_raylet_is_awaited_but_a_dead_one_is_not(tmp_path):
    slow, dead = Services(), Services()
    ray_processes._wait_longer_for_raylet(slow)
    ray_processes._wait_longer_for_raylet(dead)
    helper = exited_process("/bin/sh")

    assert slow.get_node("gcs", "id") == ("gcs", "id"), "a helper that ended was taken for a raylet"

    (tmp_path / "raylet").symlink_to("/bin/sh")
    raylet = exited_process(tmp_path / "raylet")
    with pytest.raises(SystemExit, match="raylet ended"):
        dead.get_node("gcs", "id")
    assert raylet.wait() == helper.wait() == 0, "an exited child was reaped"


@pytest.mark.cluster
@pytest.mark.nightly
@pytest.mark.skipif(not LINUX, reason="finds Ray's processes in /proc")
def test_ray_starts_on_a_machine_slower_than_its_own_limit(tmp_path, keeper):
    """Ray itself gives a raylet 30 seconds."""
    make_keys(tmp_path)
    ray = LocalRay(tmp_path, ("node-a",), keeper)
    ray.start()
    deadline_s = time.monotonic() + 60
    found = []
    while not found and time.monotonic() < deadline_s:
        found = [p for p in descendants([keeper.process.pid]) if is_raylet(p.pid)]
    os.kill(found[0].pid, signal.SIGSTOP)
    try:
        event = keeper.next_event(0.0)
        stopped_s = time.monotonic()
        while time.monotonic() - stopped_s < 40:
            event = keeper.next_event(1.0)
            assert event is None or event["event"] != "exited"
        assert not ray.has_started(ray.nodes[0])
    finally:
        os.kill(found[0].pid, signal.SIGCONT)
    while not ray.has_started(ray.nodes[0]):
        event = keeper.next_event(0.5)
        assert event is None or event["event"] != "exited", ray.nodes[0].log.read_text()
        assert time.monotonic() < deadline_s + 120
    ray.stop()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="finds Ray's processes in /proc")
def test_ray_start_ends_soon_after_its_raylet(tmp_path, keeper):
    """On a busy machine raylets exit by themselves: they wait 15 seconds for their agents."""
    make_keys(tmp_path)
    ray = LocalRay(tmp_path, ("node-a",), keeper)
    ray.start()
    kill_raylet(keeper)
    try:
        await_exit(keeper, RAYLET_NOTICED_S)
        assert "raylet ended" in ray.end_reason(ray.nodes[0])
    finally:
        ray.stop()


@pytest.mark.cluster
@pytest.mark.nightly
@pytest.mark.skipif(not LINUX, reason="finds Ray's processes in /proc")
def test_ray_start_with_late_agents_ends_with_that_reason(tmp_path, keeper):
    make_keys(tmp_path)
    ray = LocalRay(tmp_path, ("node-a",), keeper)
    ray.start()
    stopped, began_s, event = set(), time.monotonic(), None
    try:
        while event is None or event["event"] != "exited":
            assert time.monotonic() - began_s < 2 * RAYLET_NOTICED_S
            for process in descendants([keeper.process.pid]):
                if process.pid not in stopped and is_agent(process.pid):
                    os.kill(process.pid, signal.SIGSTOP)
                    stopped.add(process.pid)
            event = keeper.next_event(0.1)
        assert ray.end_reason(ray.nodes[0]) == "its agents took more than 15 s to start"
    finally:
        ray.stop()


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="finds Ray's processes in /proc")
def test_killed_raylet_of_a_running_node_is_named(tmp_path, keeper):
    make_keys(tmp_path)
    ray = LocalRay(tmp_path, ("node-a",), keeper)
    ray.start()
    began_s = time.monotonic()
    try:
        while not ray.has_started(ray.nodes[0]):
            assert time.monotonic() - began_s < 2 * RAYLET_NOTICED_S
            keeper.next_event(0.2)
        kill_raylet(keeper)
        await_exit(keeper, 2 * RAYLET_NOTICED_S)
        assert ray.end_reason(ray.nodes[0]) == "its raylet was killed by SIGKILL"
    finally:
        ray.stop()


def await_exit(keeper, limit_s):
    """Wait until one of the keeper's processes has ended."""
    began_s, event = time.monotonic(), None
    while event is None or event["event"] != "exited":
        assert time.monotonic() - began_s < limit_s
        event = keeper.next_event(0.2)


def is_agent(pid):
    """Return whether a process is one of the agents that a raylet waits for."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[1:2] == ["-u"] and words[2].endswith(("/agent.py", "/agent/main.py"))
    return False


def kill_raylet(keeper):
    deadline_s, found = time.monotonic() + 60, []
    while not found and time.monotonic() < deadline_s:
        found = [p for p in descendants([keeper.process.pid]) if is_raylet(p.pid)]
    os.kill(found[0].pid, signal.SIGKILL)


def is_raylet(pid):
    """Return whether a process is already a raylet."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/exe").resolve().name == "raylet"
    return False


def test_ray_client_is_not_started():
    class Params:
        ray_client_server_port = 10001
        session_name = None

    head, worker = Params(), Params()
    trim_ray_start(head, True)
    trim_ray_start(worker, False)

    assert head.ray_client_server_port is worker.ray_client_server_port is None
    assert head.session_name == f"s{os.getpid()}"
    assert worker.session_name is None

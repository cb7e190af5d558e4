"""A Mac of a cluster file: starting, keeping and replacing its Ray and router."""

import json
import os
import resource
import signal
import subprocess

import pytest

from router.limits import LOG_BYTES_MAX
from router.supervise import ray_member
from router.supervise.processes import identify, wait_for_exit
from router.supervise.ray_member import RayMember
from router.supervise.ray_processes import trim_ray_start

RECORD_RAY = """\
#!/usr/bin/env bash
printf '%s\\n' "$*" >> "$HOME/ray-calls"
[ "$1" = start ] || exit 0
printf '%s\\n' "$@" > "$HOME/arguments"
env | grep -E '^(RAY|DASHBOARD|MACFABRIC|AUTOSCALER)_' > "$HOME/environment"
"""
SERVE = """\
#!/usr/bin/env bash
printf '%s\\n' "$@" > "$HOME/serve-arguments"
env | grep '^RAY_' > "$HOME/serve-environment.new"
mv "$HOME/serve-environment.new" "$HOME/serve-environment"
for i in $(seq 600); do sleep 0.1; done
"""
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")

HEAD_PROCESSES = "gcs_server --gcs_server_port=6379\nraylet/raylet --a --head\n"
DRIVER_VARIABLES = {
    "RAY_AUTH_MODE": "token",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_USE_TLS": "1",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_worker_niceness": "0",
}
START_VARIABLES = {
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_START_HOOK": f"{trim_ray_start.__module__}.{trim_ray_start.__name__}",
    "RAY_enable_metrics_collection": "0",
    "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),
    "RAY_ROTATION_BACKUP_COUNT": "1",
    "RAY_raylet_start_wait_time_s": "2",
}


class Mac:
    """One Mac's folder, with stand-ins for the programs in it."""

    def __init__(self, home):
        self.home = home
        self.member = RayMember(home / "macfabric")
        self.cluster_file = home / "ray_bootstrap_config.yaml"
        self.cluster_file.write_text("cluster_name: macfabric\n")
        for folder in ("keys", "app/fabric", "app/node", "app/router"):
            (home / "macfabric" / folder).mkdir(parents=True)
        (home / "macfabric/app/node/launch.py").write_text("one = 1\n")
        (home / "macfabric/keys/cluster.key").write_text("00")
        self.install("macfabric/venv/bin/ray", RECORD_RAY)
        self.install("macfabric/venv/bin/macfabric", SERVE)

    def install(self, path, text):
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)

    def start_head(self):
        return self.member.start_head(self.cluster_file)

    def ray_calls(self):
        """Return the `ray` subcommands since the last call, without options."""
        path = self.home / "ray-calls"
        calls = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [call.split()[0] for call in calls]

    def arguments(self):
        words = (self.home / "arguments").read_text().splitlines()
        return dict(word.partition("=")[::2] for word in words)

    def environment(self, name="environment"):
        lines = (self.home / name).read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def driver_variables(self):
        folder = self.home / "macfabric"
        return DRIVER_VARIABLES | {
            "RAY_AUTH_TOKEN_PATH": f"{folder}/keys/ray.token",
            "RAY_TLS_CA_CERT": f"{folder}/keys/ca.pem",
            "RAY_TLS_SERVER_CERT": f"{folder}/keys/member.pem",
            "RAY_TLS_SERVER_KEY": f"{folder}/keys/member.key",
            "RAY_TMPDIR": f"{folder}",
        }

    def router_pid(self):
        return int(self.member.router_pid.read_text())

    def stop_router(self):
        if self.member.router_pid.exists() and identify(self.router_pid()) is not None:
            os.kill(self.router_pid(), signal.SIGKILL)


@pytest.fixture
def mac(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("RAY_", "SSH_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ray_member, "raise_open_files", lambda: None)
    monkeypatch.setattr(ray_member, "RETRY_S", 0.0)
    before = os.umask(0o077)
    mac = Mac(tmp_path)
    yield mac
    mac.stop_router()
    os.umask(before)


def wait_for(path):
    subprocess.run(
        ["bash", "-c", f"for i in $(seq 600); do [ -e {path} ] && exit; sleep 0.05; done; exit 1"],
        check=True,
    )


def show_processes(monkeypatch, listed):
    """Replace the listing of all processes; look-ups of single processes stay real."""
    ask = ray_member._ps
    monkeypatch.setattr(
        ray_member, "_ps", lambda *words: listed if words[0] == "-axwwo" else ask(*words)
    )


def test_head_starts_ray_with_options_and_environment(mac, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "192.168.1.5 50000 192.168.1.10 22")
    monkeypatch.setattr("socket.gethostname", lambda: "Annas-Mac_mini.local")
    assert mac.start_head()

    assert mac.ray_calls() == ["stop", "start"]
    arguments = mac.arguments()
    assert list(arguments)[:2] == ["start", "--head"]
    assert arguments["--node-ip-address"] == "192.168.1.10"
    assert arguments["--port"] == "6379"
    assert json.loads(arguments["--resources"]) == {"mlx": 1}
    assert arguments["--labels"] == "mac=annas-mac-mini"
    assert int(arguments["--object-store-memory"]) <= 500_000_000
    assert arguments["--autoscaling-config"] == str(mac.cluster_file)
    assert arguments["--include-dashboard"] == "false"
    assert arguments["--temp-dir"] == f"{mac.home}/macfabric/ray"
    assert "--disable-usage-stats" in arguments
    assert mac.environment() == mac.driver_variables() | START_VARIABLES | {
        "AUTOSCALER_NODE_START_WAIT_S": "31536000",
        "MACFABRIC_RAY_SESSION": "macfabric",
        "RAY_enable_autoscaler_v2": "0",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": f"{mac.home}/macfabric/gcs",
    }
    for folder in ("gcs", "logs", "ray"):
        assert (mac.home / "macfabric" / folder).stat().st_mode & 0o077 == 0


def test_worker_starts_ray_with_options_and_environment(mac, monkeypatch):
    monkeypatch.setenv("SSH_CONNECTION", "192.168.1.10 50000 192.168.1.11 22")
    monkeypatch.setenv("RAY_HEAD_IP", "192.168.1.10")
    assert mac.member.start_worker("192.168.1.10:6379")

    assert mac.ray_calls() == ["stop", "start"]
    arguments = mac.arguments()
    assert arguments["--address"] == "192.168.1.10:6379"
    assert arguments["--node-ip-address"] == "192.168.1.11"
    assert json.loads(arguments["--resources"]) == {"mlx": 1}
    assert arguments["--temp-dir"] == f"{mac.home}/macfabric/ray"
    assert mac.member.temp_dir.stat().st_mode & 0o077 == 0
    assert mac.environment() == mac.driver_variables() | START_VARIABLES | {
        "RAY_HEAD_IP": "192.168.1.10"
    }


def test_own_address_is_found_without_ssh(mac):
    """A Mac answers by `ipconfig`, Linux by `hostname -I`."""
    mac.install("bin/hostname", '#!/bin/sh\n[ "$*" = -I ] && echo 192.168.3.3 10.0.0.1\n')
    assert ray_member.own_address() == "192.168.3.3"

    mac.install("bin/ipconfig", '#!/bin/sh\n[ "$*" = "getifaddr en0" ] && echo 192.168.7.7\n')
    assert ray_member.own_address() == "192.168.7.7"


@pytest.mark.parametrize(("most", "expected"), [(100_000, 65_536), (12_000, 10_240)])
def test_open_file_limit_is_raised_as_far_as_possible(monkeypatch, most, expected):
    granted = []

    def setrlimit(_, limits):
        if limits[0] > most:
            raise ValueError
        granted.append(limits[0])

    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    ray_member.raise_open_files()
    assert granted == [expected]


def test_tables_of_earlier_version_are_removed(mac):
    """The tables contained the cluster's key."""
    tables = mac.member.tables
    tables.mkdir()
    (tables / "session_name").write_text("session_2026-01-01_00-00-00_000000_1")
    (tables / "000001.log").write_text("the cluster's key")
    mac.start_head()
    assert list(tables.iterdir()) == []

    (tables / "session_name").write_text("macfabric")
    (tables / "000002.log").write_text("ours")
    mac.start_head()
    assert len(list(tables.iterdir())) == 2


def test_failed_start_is_retried(mac):
    """Ray itself starts a worker only once."""
    once = '[ -e "$HOME/tried" ] || { touch "$HOME/tried"; exit 1; }\n'
    mac.install("macfabric/venv/bin/ray", RECORD_RAY + once)

    assert mac.member.start_worker("192.168.1.10:6379")
    assert mac.ray_calls() == ["stop", "start", "stop", "start"]


def test_head_that_never_starts_leaves_no_router(mac):
    mac.install("macfabric/venv/bin/ray", RECORD_RAY + "exit 1\n")

    assert not mac.start_head()
    assert mac.ray_calls() == ["stop", *["start", "stop"] * 3]
    assert not mac.member.router_pid.exists()
    assert not mac.member.started.exists()


@pytest.mark.parametrize("change", ["nothing", "code", "file", "keys", "ray is gone"])
def test_running_head_is_restarted_only_after_changes(mac, monkeypatch, change):
    show_processes(monkeypatch, HEAD_PROCESSES)
    assert mac.start_head()
    assert mac.ray_calls() == ["stop", "start"]
    router = mac.router_pid()
    if change == "code":
        (mac.home / "macfabric/app/node/launch.py").write_text("one = 2\n")
    elif change == "file":
        mac.cluster_file.write_text("cluster_name: mine\n")
    elif change == "keys":
        (mac.home / "macfabric/keys/cluster.key").write_text("11")
    elif change == "ray is gone":
        show_processes(monkeypatch, "")

    assert mac.start_head()
    assert mac.ray_calls() == ([] if change == "nothing" else ["stop", "start"])
    assert (mac.router_pid() == router) == (change == "nothing")


def test_ended_router_is_restarted(mac, monkeypatch):
    show_processes(monkeypatch, HEAD_PROCESSES)
    mac.start_head()
    router = identify(mac.router_pid())
    mac.stop_router()
    wait_for_exit([router], 10)
    mac.ray_calls()

    mac.start_head()
    assert mac.ray_calls() == []
    assert mac.router_pid() != router.pid


def test_router_runs_as_private_driver_in_its_own_session(mac):
    mac.start_head()
    wait_for(mac.home / "serve-environment")
    arguments = (mac.home / "serve-arguments").read_text().splitlines()

    assert arguments == ["serve", "--address", "auto", "--config", str(mac.cluster_file)]
    assert mac.environment("serve-environment") == mac.driver_variables()
    assert (mac.home / "macfabric/logs/serve.log").stat().st_mode & 0o077 == 0
    assert os.getsid(mac.router_pid()) == mac.router_pid()


def test_other_program_with_the_routers_pid_is_left_alone(mac):
    mac.member.router_pid.write_text(f"{os.getpid()}\n")
    mac.start_head()

    assert mac.router_pid() != os.getpid()

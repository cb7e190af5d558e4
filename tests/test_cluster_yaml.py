"""The cluster file we ship is one Ray takes, and its commands do what their comments say."""

import copy
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from click import ClickException
from jsonschema import ValidationError
from ray.autoscaler._private.util import prepare_config, validate_config

from fabric.settings import parse_settings
from router.limits import LOG_BYTES_MAX
from router.supervise.ray_processes import trim_ray_start

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = yaml.safe_load((ROOT / "cluster.yaml").read_text())
START = SHIPPED["head_start_ray_commands"], SHIPPED["worker_start_ray_commands"]
LOOK, STOP_ROUTER, STOP_RAY, START_HEAD, START_ROUTER = START[0]
WORKER_STOP_RAY, START_WORKER = START[1]
COMMANDS = [*SHIPPED["setup_commands"], *START[0], *START[1]]
KEYS = {
    "RAY_AUTH_TOKEN_PATH": "macfabric/keys/ray.token",
    "RAY_TLS_CA_CERT": "macfabric/keys/ca.pem",
    "RAY_TLS_SERVER_CERT": "macfabric/keys/member.pem",
    "RAY_TLS_SERVER_KEY": "macfabric/keys/member.key",
    "RAY_TMPDIR": "macfabric",
}
RAY_SWITCHES = {
    "RAY_AUTH_MODE": "token",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_USE_TLS": "1",
    "RAY_worker_niceness": "0",
}
START_SWITCHES = {
    "RAY_START_HOOK": f"{trim_ray_start.__module__}.{trim_ray_start.__name__}",
    "RAY_enable_metrics_collection": "0",
    "RAY_ROTATION_MAX_BYTES": str(LOG_BYTES_MAX),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}

# What a typing error does to the file -> the error Ray answers with.
REJECTED_BY_RAY = {
    "an unknown key": (lambda c: c.update(worker_nodez={}), ValidationError),
    "no head_ip": (lambda c: c["provider"].pop("head_ip"), ClickException),
    "one worker, not a list": (
        lambda c: c["provider"].update(worker_ips="192.168.1.11"),
        ValidationError,
    ),
    "an unknown key of auth": (lambda c: c["auth"].update(port=22), ValidationError),
    "node types, as in a cloud": (
        lambda c: c.update(available_node_types={"mac": {"resources": {}, "node_config": {}}}),
        ClickException,
    ),
    "one command, not a list": (lambda c: c.update(setup_commands="true"), TypeError),
    "metadata is no mapping": (lambda c: c.update(metadata="macfabric"), ValidationError),
}


def ray_takes(config: dict) -> dict:
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_takes_the_shipped_file():
    prepared = ray_takes(SHIPPED)

    assert prepared["provider"]["type"] == "local"
    assert prepared["max_workers"] == 2
    assert prepared["metadata"] == SHIPPED["metadata"]
    assert prepared["setup_commands"] == SHIPPED["setup_commands"]


@pytest.mark.parametrize("name", REJECTED_BY_RAY)
def test_ray_rejects(name):
    spoil, error = REJECTED_BY_RAY[name]
    config = copy.deepcopy(SHIPPED)
    spoil(config)

    with pytest.raises(error):
        ray_takes(config)


def test_shipped_file_has_none_of_the_mistakes_that_ray_accepts():
    provider, workers = SHIPPED["provider"], SHIPPED["provider"]["worker_ips"]

    assert set(provider) == {"type", "head_ip", "worker_ips"}
    assert provider["head_ip"] not in workers
    assert len(set(workers)) == len(workers)
    assert SHIPPED["min_workers"] == SHIPPED["max_workers"] == len(workers)
    assert set(SHIPPED["auth"]) == {"ssh_user", "ssh_private_key"}
    assert SHIPPED["cluster_name"] == "macfabric"


def test_our_section_is_accepted_by_our_parser():
    settings = parse_settings(SHIPPED["metadata"]["macfabric"])

    assert settings.router.host == "127.0.0.1"
    assert settings.router.port == 8000


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_command_is_valid_bash(command):
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "\n" not in command


# --- the commands, run against stand-ins for ray, macfabric, uv and the Mac's own tools ----------

RECORDER = """\
#!/usr/bin/env bash
log="$HOME/$(basename "$0").log"
{ printf '%s\\n' "$@"; env | grep '^RAY_'; } > "$log.new"
mv "$log.new" "$log"
"""
STANDINS = {
    "macfabric/venv/bin/ray": RECORDER,
    "macfabric/venv/bin/macfabric": RECORDER + "for i in $(seq 200); do sleep 0.1; done\n",
    ".local/bin/hostname": """\
#!/bin/sh
case $1 in -s) echo Annas-Mac_mini;; -I) echo 192.168.3.3 10.0.0.1;; esac
""",
}
IPCONFIG = """\
#!/bin/sh
[ "$*" = "getifaddr en0" ] && echo 192.168.7.7
"""


# What `ps` shows of a head that runs: enough for the file's own look at it.
RUNNING = """\
#!/bin/sh
case "$*" in *-axww*) echo gcs_server --gcs_server_port=6379; echo raylet/raylet --a --head;;
*) exec /bin/ps "$@";; esac
"""


class Mac:
    """A home folder with stand-ins, in which the file's commands run as Ray would run them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        for path, text in STANDINS.items():
            self.install(path, text)

    def install(self, path: str, text: str) -> None:
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)

    def run(self, command: str, **env: str) -> None:
        path = f"{self.home}/.local/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", f"true && ({command})"],
            env={"HOME": str(self.home), "PATH": path, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def log(self, program: str) -> tuple[list[str], dict[str, str]]:
        """Return the arguments and Ray's switches that `program` was last started with."""
        path = self.home / f"{program}.log"
        deadline_s = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline_s, f"{program} was not started"
            time.sleep(0.02)
        lines = path.read_text().splitlines()
        switches = [line for line in lines if line.startswith("RAY_")]
        arguments = [line for line in lines if not line.startswith("RAY_")]
        return arguments, dict(line.split("=", 1) for line in switches)


def alive(pid: int) -> bool:
    """Tell whether `pid` runs; one that waits for its parent to notice its end does not."""
    done = subprocess.run(
        ["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() not in {"", "Z", "Zs"}


@pytest.fixture
def mac(tmp_path):
    return Mac(tmp_path)


def switches_of(mac: Mac) -> dict[str, str]:
    return RAY_SWITCHES | {name: f"{mac.home}/{path}" for name, path in KEYS.items()}


def options(arguments: list[str]) -> dict[str, str]:
    return dict(a.partition("=")[::2] for a in arguments)


@pytest.mark.parametrize("command", [STOP_RAY, WORKER_STOP_RAY])
def test_an_earlier_ray_is_stopped(mac, command):
    mac.run(command)

    assert mac.log("ray")[0] == ["stop"]


def test_head_start_command(mac):
    mac.run(START_HEAD, SSH_CONNECTION="192.168.1.5 50000 192.168.1.10 22")
    arguments, switches = mac.log("ray")
    given = options(arguments)

    assert arguments[:2] == ["start", "--head"]
    assert given["--node-ip-address"] == "192.168.1.10"
    assert json.loads(given["--resources"]) == {"mlx": 1}
    assert given["--labels"] == "mac=annas-mac-mini"
    assert int(given["--object-store-memory"]) <= 500_000_000
    assert given["--autoscaling-config"] == "~/ray_bootstrap_config.yaml"
    assert given["--include-dashboard"] == "false"
    assert given["--temp-dir"] == f"{mac.home}/macfabric/ray"
    assert switches == switches_of(mac) | START_SWITCHES | {
        "RAY_enable_autoscaler_v2": "0",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": f"{mac.home}/macfabric/gcs",
    }
    for folder in ("gcs", "logs", "ray"):
        assert (mac.home / "macfabric" / folder).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(("most", "expected"), [(100_000, 65_536), (12_000, 10_240)])
@pytest.mark.parametrize("command", [START_HEAD, START_WORKER])
def test_a_mac_that_allows_fewer_open_files_gives_what_it_has(mac, command, most, expected):
    refusing = f'ulimit() {{ [ "$2" -le {most} ] && echo "$2" > "$HOME/open-files"; }}; '
    mac.run(refusing + command, SSH_CONNECTION="", RAY_HEAD_IP="192.168.1.10")
    assert (mac.home / "open-files").read_text() == f"{expected}\n"


def test_worker_start_command(mac):
    ssh = "192.168.1.10 50000 192.168.1.11 22"
    mac.run(START_WORKER, SSH_CONNECTION=ssh, RAY_HEAD_IP="192.168.1.10")
    arguments, switches = mac.log("ray")
    given = options(arguments)

    assert arguments[0] == "start"
    assert given["--address"] == "192.168.1.10:6379"
    assert given["--node-ip-address"] == "192.168.1.11"
    assert json.loads(given["--resources"]) == {"mlx": 1}
    assert given["--labels"] == "mac=annas-mac-mini"
    assert given["--temp-dir"] == f"{mac.home}/macfabric/ray"
    assert (mac.home / "macfabric/ray").stat().st_mode & 0o077 == 0
    assert switches == switches_of(mac) | START_SWITCHES | {"RAY_HEAD_IP": "192.168.1.10"}


def test_tables_that_an_earlier_version_wrote_with_the_key_in_them_go(mac):
    gcs = mac.home / "macfabric/gcs"
    gcs.mkdir(parents=True)
    (gcs / "session_name").write_text("session_2026-01-01_00-00-00_000000_1")
    (gcs / "000001.log").write_text("the cluster's key")
    mac.run(START_HEAD)
    assert list(gcs.iterdir()) == []

    (gcs / "session_name").write_text("macfabric")
    (gcs / "000002.log").write_text("ours")
    mac.run(START_HEAD)
    assert len(list(gcs.iterdir())) == 2


def test_keys_are_closed_to_others(mac):
    keys = mac.home / "macfabric/keys"
    keys.mkdir(parents=True, mode=0o755)
    (keys / "cluster.key").touch(mode=0o644)
    mac.run(SHIPPED["setup_commands"][0])
    closed = (keys.parent, keys, keys / "cluster.key")
    assert [path for path in closed if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("command", [*START[0], *START[1]])
def test_what_commands_write_is_private(command):
    writes = " > " in command or ">>" in command or "mkdir" in command or "ray start" in command
    assert not writes or "umask 077;" in command


@pytest.mark.parametrize("command", [START_HEAD, START_WORKER])
def test_a_start_that_fails_is_tried_again(mac, command):
    """Ray itself would leave a worker out for ever."""
    once = "[ -e $HOME/tried ] || { touch $HOME/tried; exit 1; }\n"
    mac.install("macfabric/venv/bin/ray", RECORDER + 'case "$1" in start) ' + once + ";; esac\n")
    mac.install(".local/bin/sleep", "#!/bin/sh\n")

    mac.run(command, RAY_HEAD_IP="192.168.1.10")

    assert (mac.home / "tried").exists()
    assert mac.log("ray")[0][0] == "start"


@pytest.mark.parametrize("command", [START_HEAD, START_WORKER])
def test_address_without_ssh(mac, command):
    """A Mac answers by `ipconfig`, Linux by `hostname -I`."""
    mac.run(command, RAY_HEAD_IP="192.168.1.10")
    assert options(mac.log("ray")[0])["--node-ip-address"] == "192.168.3.3"

    mac.install(".local/bin/ipconfig", IPCONFIG)
    mac.run(command, RAY_HEAD_IP="192.168.1.10")
    assert options(mac.log("ray")[0])["--node-ip-address"] == "192.168.7.7"


@pytest.mark.parametrize(
    "change",
    ["nothing", "code", "file", "ray is gone", "never started"],
)
def test_a_head_that_runs_is_left_alone_unless_something_changed(mac, change):
    code, file = mac.home / "macfabric/app/node/launch.py", mac.home / "ray_bootstrap_config.yaml"
    for folder in ("fabric", "node", "router"):
        (mac.home / "macfabric/app" / folder).mkdir(parents=True)
    code.write_text("one = 1\n")
    file.write_text("cluster_name: macfabric\n")
    mac.install(".local/bin/ps", RUNNING)
    if change != "never started":
        mac.run(LOOK)
        mac.run(START_HEAD)
        assert mac.log("ray")[0][0] == "start"
        (mac.home / "ray.log").unlink()
    if change == "code":
        code.write_text("one = 2\n")
    elif change == "file":
        file.write_text("cluster_name: mine\n")
    elif change == "ray is gone":
        mac.install(".local/bin/ps", "#!/bin/sh\n")

    mac.run(LOOK)
    mac.run(STOP_RAY)
    stopped = (mac.home / "ray.log").exists()
    mac.run(START_HEAD)
    started = (mac.home / "ray.log").exists() and mac.log("ray")[0][0] == "start"

    assert (stopped, started) == ((False, False) if change == "nothing" else (True, True))


def test_router_is_started_once_and_stopped_by_the_next_start(mac):
    mac.run(START_HEAD)
    mac.run(START_ROUTER)
    arguments, switches = mac.log("macfabric")
    pid = int((mac.home / "macfabric" / "serve.pid").read_text())
    try:
        config = f"{mac.home}/ray_bootstrap_config.yaml"
        assert arguments == ["serve", "--address", "auto", "--config", config]
        assert switches == switches_of(mac)
        assert (mac.home / "macfabric/logs/serve.log").stat().st_mode & 0o077 == 0
        assert alive(pid)

        (mac.home / "macfabric" / "steady").touch()
        mac.run(STOP_ROUTER)
        mac.run(START_ROUTER)
        assert int((mac.home / "macfabric" / "serve.pid").read_text()) == pid
        (mac.home / "macfabric" / "steady").unlink()

        mac.run(STOP_ROUTER)
        assert not (mac.home / "macfabric" / "serve.pid").exists()
        assert not alive(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_stopping_the_router_leaves_a_stranger_with_its_number_alone(mac):
    (mac.home / "macfabric" / "serve.pid").write_text(f"{os.getpid()}\n")
    mac.run(STOP_ROUTER)

    assert not (mac.home / "macfabric" / "serve.pid").exists()


def test_virtual_environment_is_made_once(mac):
    _, make_venv, install = SHIPPED["setup_commands"]
    (mac.home / "macfabric" / "app").mkdir()
    mac.install(".local/bin/uv", RECORDER)

    mac.run(make_venv)
    venv = f"{mac.home}/macfabric/venv"
    assert mac.log("uv")[0] == ["venv", "--quiet", "--python", "3.12", venv]

    (mac.home / "uv.log").unlink()
    mac.install("macfabric/venv/bin/python", "#!/bin/sh\nexit 0\n")
    mac.run(make_venv)
    assert not (mac.home / "uv.log").exists()

    mac.run(install)
    arguments = mac.log("uv")[0]
    assert arguments[:2] == ["pip", "install"]
    assert arguments[5:7] == ["-c", "constraints.txt"]
    assert arguments[-1] == "."

"""Ray accepts the shipped cluster file, and its commands install the code and start Ray."""

import copy
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click import ClickException
from jsonschema import ValidationError
from ray.autoscaler._private.commands import warn_about_bad_start_command
from ray.autoscaler._private.util import prepare_config, validate_config

from fabric.settings import parse_settings

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = yaml.safe_load((ROOT / "cluster.yaml").read_text())
INSTALL = SHIPPED["setup_commands"][0]
START_HEAD = SHIPPED["head_start_ray_commands"][0]
START_WORKER = SHIPPED["worker_start_ray_commands"][0]
COMMANDS = [INSTALL, START_HEAD, START_WORKER]
LINES_MAX = 120

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


def validate_with_ray(config: dict) -> dict:
    prepared = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_ray_accepts_the_shipped_file():
    prepared = validate_with_ray(SHIPPED)

    assert prepared["provider"]["type"] == "local"
    assert prepared["max_workers"] == 2
    assert prepared["metadata"] == SHIPPED["metadata"]
    assert prepared["setup_commands"] == SHIPPED["setup_commands"]


@pytest.mark.parametrize("name", REJECTED_BY_RAY)
def test_ray_rejects_misspelled_files(name):
    spoil, error = REJECTED_BY_RAY[name]
    config = copy.deepcopy(SHIPPED)
    spoil(config)

    with pytest.raises(error):
        validate_with_ray(config)


def test_shipped_file_has_none_of_the_mistakes_that_ray_accepts():
    provider, workers = SHIPPED["provider"], SHIPPED["provider"]["worker_ips"]

    assert set(provider) == {"type", "head_ip", "worker_ips"}
    assert provider["head_ip"] not in workers
    assert len(set(workers)) == len(workers)
    assert SHIPPED["min_workers"] == SHIPPED["max_workers"] == len(workers)
    assert set(SHIPPED["auth"]) == {"ssh_user", "ssh_private_key"}
    assert SHIPPED["cluster_name"] == "macfabric"


def test_macfabric_section_parses():
    settings = parse_settings(SHIPPED["metadata"]["macfabric"])

    assert settings.router.host == "127.0.0.1"
    assert settings.router.port == 8000


def test_file_is_short_enough_to_read():
    assert len((ROOT / "cluster.yaml").read_text().splitlines()) <= LINES_MAX


def test_each_command_list_holds_one_command():
    keys = ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    assert [len(SHIPPED[key]) for key in keys] == [1, 1, 1]


def test_ray_recognizes_its_start_command(capsys):
    """Ray warns of a head that neither starts Ray nor names its cluster file."""
    warn_about_bad_start_command(SHIPPED["head_start_ray_commands"])
    printed = capsys.readouterr()
    assert printed.out + printed.err == ""


# --- the commands, run against stand-ins for ray, macfabric serve and uv ----------------------

RECORDER = """\
#!/usr/bin/env bash
log="$HOME/$(basename "$0").log"
{ printf '%s\\n' "$@"; env | grep '^RAY_'; } > "$log.new"
mv "$log.new" "$log"
"""
MACFABRIC = f"""\
#!/usr/bin/env bash
[ "$1" = serve ] || exec {sys.executable} -P -m router.cli.main "$@"
exec "$HOME/serve" "$@"
"""


class Mac:
    """A home folder with stand-ins, in which the file's commands run as Ray would run them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.install("macfabric/venv/bin/ray", RECORDER)
        self.install("macfabric/venv/bin/macfabric", MACFABRIC)
        self.install("serve", RECORDER)
        (home / "macfabric/keys").mkdir()
        (home / "ray_bootstrap_config.yaml").write_text("cluster_name: macfabric\n")
        (home / "macfabric/app/router").mkdir(parents=True)
        (home / "macfabric/app/router/supervise").symlink_to(ROOT / "router/supervise")

    def install(self, path: str, text: str) -> None:
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o755)

    def run(self, command: str, **env: str) -> None:
        path = f"{self.home}/.local/bin:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", f"true && ({command})"],
            env={"HOME": str(self.home), "PATH": path, "PYTHONPATH": str(ROOT), **env},
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


@pytest.fixture
def mac(tmp_path):
    return Mac(tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_valid_bash(command):
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr


def test_head_command_starts_ray_and_the_router(mac):
    mac.run(START_HEAD, SSH_CONNECTION="192.168.1.5 50000 192.168.1.10 22")

    arguments, switches = mac.log("ray")
    assert arguments[:2] == ["start", "--head"]
    assert "--node-ip-address=192.168.1.10" in arguments
    assert f"--autoscaling-config={mac.home}/ray_bootstrap_config.yaml" in arguments
    assert switches["RAY_enable_autoscaler_v2"] == "0"
    config = f"{mac.home}/ray_bootstrap_config.yaml"
    assert mac.log("serve")[0] == ["serve", "--address", "auto", "--config", config]


def test_worker_command_joins_the_head(mac):
    ssh = "192.168.1.10 50000 192.168.1.11 22"
    mac.run(START_WORKER, SSH_CONNECTION=ssh, RAY_HEAD_IP="192.168.1.10")

    arguments, switches = mac.log("ray")
    assert arguments[:2] == ["start", "--address=192.168.1.10:6379"]
    assert "--node-ip-address=192.168.1.11" in arguments
    assert switches["RAY_AUTH_MODE"] == "token"


def test_install_makes_keys_private(mac):
    mac.install(".local/bin/uv", RECORDER)
    keys = mac.home / "macfabric/keys"
    keys.chmod(0o755)
    (keys / "cluster.key").touch(mode=0o644)
    mac.run(INSTALL)

    closed = (keys.parent, keys, keys / "cluster.key")
    assert [path for path in closed if path.stat().st_mode & 0o077] == []


def test_install_makes_the_virtual_environment_once(mac):
    (mac.home / "macfabric/keys/cluster.key").touch()
    calls = "printf '%s ' \"$@\" >> $HOME/uv.log; echo >> $HOME/uv.log\n"
    mac.install(".local/bin/uv", f"#!/bin/sh\n{calls}")
    venv = f"{mac.home}/macfabric/venv"
    pip = f"pip install --quiet --python {venv}/bin/python -c constraints.txt"
    pip += " --reinstall-package macfabric . "

    mac.run(INSTALL)
    venv_call = f"venv --quiet --python 3.12 {venv} "
    assert (mac.home / "uv.log").read_text().splitlines() == [venv_call, pip]

    (mac.home / "uv.log").unlink()
    mac.install("macfabric/venv/bin/python", "#!/bin/sh\nexit 0\n")
    mac.run(INSTALL)
    assert (mac.home / "uv.log").read_text().splitlines() == [pip]


def test_install_without_uv_uses_python_and_pip(mac):
    (mac.home / "macfabric/keys/cluster.key").touch()
    mac.install(
        ".local/bin/python3.12",
        '#!/bin/sh\necho "$@" > $HOME/python.log; mkdir -p $3/bin; cp $HOME/pip $3/bin/python\n',
    )
    mac.install("pip", '#!/bin/sh\necho "$@" > $HOME/pip.log\n')
    mac.run(INSTALL, PATH=f"{mac.home}/.local/bin:/usr/bin:/bin")

    venv = f"{mac.home}/macfabric/venv"
    assert (mac.home / "python.log").read_text() == f"-m venv {venv}\n"
    assert (mac.home / "pip.log").read_text() == "-m pip install --quiet -c constraints.txt .\n"

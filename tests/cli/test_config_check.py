"""`config check` finds what Ray rejects, what Ray accepts although wrong, and our own errors."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from router.cli.config_check import own_findings

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = yaml.safe_load((ROOT / "cluster.yaml").read_text())


def set_command(key: str, old: str, new: str):
    def spoil(config: dict) -> None:
        config[key] = [command.replace(old, new) for command in config[key]]

    return spoil


HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"
# What goes wrong -> how, the level and place of the finding, and a piece of its text.
MISTAKES = {
    "no name": (lambda c: c.pop("cluster_name"), "warning", "cluster_name", "missing"),
    "a cloud": (lambda c: c["provider"].update(type="aws"), "error", "provider.type", "local"),
    "an unknown provider key": (
        lambda c: c["provider"].update(thunderbolt="en5"),
        "error",
        "provider.thunderbolt",
        "unknown",
    ),
    "the head as a worker": (
        lambda c: c["provider"]["worker_ips"].append(c["provider"]["head_ip"]),
        "error",
        "provider.worker_ips",
        "names the head",
    ),
    "a worker twice": (
        lambda c: c["provider"]["worker_ips"].append(c["provider"]["worker_ips"][0]),
        "error",
        "provider.worker_ips",
        "twice",
    ),
    "too few workers": (
        lambda c: c.update(max_workers=1),
        "error",
        "max_workers",
        "leaves 1 of 2 workers out",
    ),
    "too few at first": (lambda c: c.update(min_workers=0), "error", "min_workers", "leaves 2"),
    "too many": (lambda c: c.update(max_workers=5), "warning", "max_workers", "only 2"),
    "no user": (lambda c: c["auth"].pop("ssh_user"), "error", "auth.ssh_user", "KeyError"),
    "no auth": (lambda c: c.pop("auth"), "error", "auth.ssh_user", "missing"),
    "a key that is not there": (
        lambda c: c["auth"].update(ssh_private_key="/nowhere/key"),
        "warning",
        "auth.ssh_private_key",
        "/nowhere/key",
    ),
    "no key for the head": (
        lambda c: c["auth"].pop("ssh_private_key"),
        "error",
        "auth.ssh_private_key",
        "starts the workers",
    ),
    "the head is everybody's own": (
        lambda c: c["provider"].update(head_ip="127.0.0.1"),
        "error",
        "provider.head_ip",
        "for itself",
    ),
    "a worker is everybody's own": (
        lambda c: c["provider"]["worker_ips"].append("localhost"),
        "error",
        "provider.worker_ips",
        "for itself",
    ),
    "a name that may lead home": (
        lambda c: c["provider"].update(head_ip="studio.local"),
        "warning",
        "provider.head_ip",
        "studio.local",
    ),
    "open to the network, but for nobody": (
        lambda c: c["metadata"]["macfabric"]["router"].update(host="0.0.0.0"),
        "warning",
        "metadata.macfabric.router.api_keys",
        "refused",
    ),
    "a mount that is not there": (
        lambda c: c["file_mounts"].update({"~/x": "./nowhere"}),
        "error",
        "file_mounts.~/x",
        "./nowhere",
    ),
    "broken shell": (
        lambda c: c["setup_commands"].append("if true; then echo"),
        "error",
        "setup_commands.3",
        "no valid shell",
    ),
    "autoscaler v2": (
        set_command(HEAD, "RAY_enable_autoscaler_v2=0", ""),
        "error",
        HEAD,
        "one worker too few",
    ),
    "mixed auth": (set_command(WORKER, "RAY_AUTH_MODE=token", ""), "warning", WORKER, "AUTH"),
    "no macOS switch": (
        set_command(HEAD, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1", ""),
        "warning",
        HEAD,
        "more than one Mac",
    ),
    "niceness": (set_command(WORKER, "RAY_worker_niceness=0", ""), "warning", WORKER, "15"),
    "no label": (set_command(WORKER, "--labels=", "--tags="), "warning", WORKER, "mac=NAME"),
    "no resource": (set_command(HEAD, "mlx", "gpu"), "warning", HEAD, "mlx"),
    "no address": (set_command(HEAD, "--node-ip-address", "--x"), "warning", HEAD, "guesses"),
    "a big store": (set_command(HEAD, "--object-store-memory", "--x"), "warning", HEAD, "2 GiB"),
    "no router": (set_command(HEAD, "macfabric serve", "true"), "error", HEAD, "nothing answers"),
    "no way to the head": (
        set_command(WORKER, "RAY_HEAD_IP", "HEAD"),
        "error",
        WORKER,
        "do not know the head",
    ),
    "a setting out of range": (
        lambda c: c["metadata"]["macfabric"]["router"].update(port=70000),
        "error",
        "metadata.macfabric",
        "router.port",
    ),
    "an unknown setting": (
        lambda c: c["metadata"]["macfabric"].update(modle="recall"),
        "error",
        "metadata.macfabric",
        "unknown field",
    ),
}
REJECTED_BY_RAY = {
    "an unknown key": (lambda c: c.update(worker_nodez={}), "worker_nodez"),
    "no head": (lambda c: c["provider"].pop("head_ip"), "head_ip"),
    "a port in auth": (lambda c: c["auth"].update(port=22), "port"),
    "workers not listed": (lambda c: c["provider"].update(worker_ips="10.0.0.1"), "worker_ips"),
    "node types, as in a cloud": (
        lambda c: c.update(available_node_types={"mac": {"resources": {}, "node_config": {}}}),
        "available_node_types",
    ),
    "one command": (lambda c: c.update(setup_commands="true"), ""),
}


def spoiled(spoil) -> dict:
    config = copy.deepcopy(SHIPPED)
    spoil(config)
    return config


def here_and_now(findings):
    """Leave out what depends on this machine: the operator's ssh key and Ray's password."""
    mine = ("auth.ssh_private_key", "file_mounts.~/.ray/auth_token")
    told = ("nowhere", "starts the workers")
    return [f for f in findings if f.where not in mine or any(t in f.message for t in told)]


def test_the_shipped_file_is_fine():
    assert here_and_now(own_findings(SHIPPED, ROOT)) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_finds(name):
    spoil, level, where, text = MISTAKES[name]
    found = here_and_now(own_findings(spoiled(spoil), ROOT))

    assert [f for f in found if (f.level, f.where) == (level, where) and text in f.message], found


@pytest.mark.parametrize("name", REJECTED_BY_RAY)
def test_passes_on_what_ray_says(run, tmp_path, name):
    spoil, text = REJECTED_BY_RAY[name]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(spoiled(spoil)))
    status, out, err = run("config", "check", str(path), "--json")
    ray = [f["message"] for f in json.loads(out)["findings"] if f["where"] == "Ray"]

    assert (status, err) == (1, "")
    assert len(ray) == 1
    assert text in ray[0]
    assert "\n" not in ray[0]


def test_mounts_are_looked_for_where_ray_up_runs(run, tmp_path, monkeypatch):
    path = tmp_path / "elsewhere" / "cluster.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(SHIPPED | {"file_mounts": {"~/x": "./fabric"}}))
    monkeypatch.chdir(ROOT)
    assert run("config", "check", str(path))[0] == 0

    monkeypatch.chdir(path.parent)
    status, out, _ = run("config", "check", str(path))
    assert (status, f"seen from {path.parent}" in out) == (1, True)


def test_a_good_file_says_so(run, tmp_path):
    config = copy.deepcopy(SHIPPED)
    config["file_mounts"] = {}
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    status, out, _ = run("config", "check", str(path))

    assert status == 0
    assert f"{path} is fine" in out


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "{", "\x00"])
def test_what_is_no_cluster_file_is_misuse(run, tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)

    assert run("config", "check", str(path))[0] == 2

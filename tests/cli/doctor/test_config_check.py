"""`config check` finds errors that Ray rejects, errors that Ray accepts, and our own."""

import copy
import json
from hashlib import sha256
from pathlib import Path

import pytest
import yaml

from fabric.errors import RejectedError
from fabric.keys import SHIPPED_KEYS
from fabric.settings import parse_settings
from router.cli.config_file import read_settings
from router.cli.doctor.config_check import own_findings
from router.cli.errors import CommandError

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = yaml.safe_load((ROOT / "cluster.yaml").read_text())


def set_command(key: str, old: str, new: str):
    def spoil(config: dict) -> None:
        config[key] = [command.replace(old, new) for command in config[key]]

    return spoil


HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"
# Mistake -> change, level and place of the finding, and a part of its text.
MISTAKES = {
    "no name": (lambda c: c.pop("cluster_name"), "warning", "cluster_name", "missing"),
    "a cloud": (lambda c: c["provider"].update(type="aws"), "error", "provider.type", "local"),
    "a key for each node's own tenant": (
        lambda c: c["metadata"]["macfabric"]["router"].update(api_keys={"_selftest": "0" * 16}),
        "error",
        "metadata.macfabric.router.api_keys._selftest",
        "reserved for the self-tests",
    ),
    "a share for each node's own tenant": (
        lambda c: c["metadata"]["macfabric"]["node"].update(tenants={"_selftest": {}}),
        "error",
        "metadata.macfabric.node.tenants._selftest",
        "reserved for the self-tests",
    ),
    "an unknown provider key": (
        lambda c: c["provider"].update(thunderbolt="en5"),
        "error",
        "provider.thunderbolt",
        "unknown",
    ),
    "the head as a worker": (
        lambda c: c["provider"]["worker_ips"].append(c["provider"]["head_ip"]),
        "error",
        "provider.worker_ips[2]",
        "names the head",
    ),
    "a worker twice": (
        lambda c: c["provider"]["worker_ips"].append(c["provider"]["worker_ips"][0]),
        "error",
        "provider.worker_ips[2]",
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
        "error",
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
        "resolves to itself",
    ),
    "a worker is everybody's own": (
        lambda c: c["provider"]["worker_ips"].append("localhost"),
        "error",
        "provider.worker_ips[2]",
        "resolves to itself",
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
        "setup_commands[1]",
        "not valid shell",
    ),
    "no head": (set_command(HEAD, "--head", ""), "error", HEAD, "ray start --head"),
    "no cluster file": (
        set_command(HEAD, "--autoscaling-config", "--x"),
        "error",
        HEAD,
        "--autoscaling-config",
    ),
    "no way to the head": (
        set_command(WORKER, "RAY_HEAD_IP", "HEAD"),
        "error",
        WORKER,
        "$RAY_HEAD_IP",
    ),
    "a setting out of range": (
        lambda c: c["metadata"]["macfabric"]["router"].update(port=70000),
        "error",
        "metadata.macfabric.router.port",
        "0-65535",
    ),
    "an unknown setting": (
        lambda c: c["metadata"]["macfabric"].update(modle="recall"),
        "error",
        "metadata.macfabric.modle",
        "did you mean model?",
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


DIGEST = sha256(b"0123456789abcdef").hexdigest()


def spoiled_config(spoil) -> dict:
    config = copy.deepcopy(SHIPPED)
    spoil(config)
    return config


def machine_independent(findings):
    """Remove findings that depend on this machine: the operator's ssh key and Ray's password."""
    mine = ("auth.ssh_private_key", "file_mounts.~/macfabric/keys")
    relevant = ("nowhere", "starts the workers")
    ours = [f for f in findings if "compiled files" not in f.message]  # of an earlier user
    return [f for f in ours if f.where not in mine or any(t in f.message for t in relevant)]


def test_shipped_file_has_no_findings():
    assert machine_independent(own_findings(SHIPPED, ROOT)) == []


@pytest.mark.parametrize("name", MISTAKES)
def test_config_check_finds_mistake(name):
    spoil, level, where, text = MISTAKES[name]
    found = machine_independent(own_findings(spoiled_config(spoil), ROOT))

    assert [f for f in found if (f.level, f.where) == (level, where) and text in f.message], found


@pytest.mark.parametrize("name", REJECTED_BY_RAY)
def test_config_check_reports_error_of_ray(run, tmp_path, name):
    spoil, text = REJECTED_BY_RAY[name]
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(spoiled_config(spoil)))
    status, out, err = run("config", "check", str(path), "--json")
    ray = [f["message"] for f in json.loads(out)["findings"] if f["where"] == "Ray"]

    assert (status, err) == (1, "")
    assert len(ray) == 1
    assert text in ray[0]
    assert "\n" not in ray[0]


def test_mounts_are_resolved_from_working_directory(run, tmp_path, monkeypatch):
    path = tmp_path / "elsewhere" / "cluster.yaml"
    path.parent.mkdir()
    mounts = {"~/x": "./fabric", SHIPPED_KEYS: str(tmp_path / "made" / "keys")}
    auth = SHIPPED["auth"] | {"ssh_private_key": __file__}
    path.write_text(yaml.safe_dump(SHIPPED | {"file_mounts": mounts, "auth": auth}))
    assert run("certs", "create", str(path))[0] == 0
    monkeypatch.chdir(ROOT)
    assert run("config", "check", str(path))[0] == 0

    monkeypatch.chdir(path.parent)
    status, out, _ = run("config", "check", str(path))
    assert (status, f"seen from {path.parent}" in out) == (1, True)


def test_compiled_files_in_mounts_are_reported(tmp_path, monkeypatch):
    compiled = tmp_path / "app" / "__pycache__" / "x.cpython-312.pyc"
    compiled.parent.mkdir(parents=True)
    (tmp_path / "app" / "x.py").touch()
    config = {"file_mounts": {"~/x": "./app"}}

    def mount_findings():
        findings = own_findings(SHIPPED | config, tmp_path)
        return [(f.level, f.message) for f in findings if f.where == "file_mounts.~/x"]

    assert mount_findings() == []
    compiled.touch()
    ((level, message),) = mount_findings()
    assert level == "warning"
    assert "holds 1 compiled files" in message
    monkeypatch.setattr("os.access", lambda path, _: path != compiled)  # root can read every file
    assert mount_findings()[0][0] == "error"
    assert str(compiled) in mount_findings()[0][1]


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "{", "\x00"])
def test_invalid_cluster_file_is_misuse(run, tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)

    assert run("config", "check", str(path))[0] == 2


KEYS = {
    "router.api_keys": {"api_keys": {"family": "0123456789abcdef"}},
    "router.operator_keys": {"operator_keys": {"me": "0123456789abcdef"}},
}


@pytest.mark.parametrize("where", KEYS)
def test_plain_keys_are_warned_about_but_digests_are_not(run, tmp_path, where):
    path = tmp_path / "cluster.yaml"

    def findings(router, mode):
        whole = spoiled_config(lambda c: c["metadata"]["macfabric"]["router"].update(router))
        path.write_text(yaml.safe_dump(whole))
        path.chmod(mode)
        found = json.loads(run("config", "check", str(path), "--json")[1])["findings"]
        return [f["message"] for f in found if f["where"].endswith(where)]

    digest = "sha256:" + "0f" * 32
    hashed = {kind: dict.fromkeys(keys, digest) for kind, keys in KEYS[where].items()}

    assert len(findings(KEYS[where], 0o644)) == 2
    assert len(findings(KEYS[where], 0o640)) == 2
    private = findings(KEYS[where], 0o600)
    assert len(private) == 1
    assert "sha256" in private[0]
    assert findings(hashed, 0o644) == []


def test_key_file_must_be_private_and_valid(run, tmp_path):
    path, keys = tmp_path / "cluster.yaml", tmp_path / "keys.yaml"
    router = {"api_keys_file": str(keys), "api_keys": {"other": "fedcba9876543210"}}
    path.write_text(yaml.safe_dump({"metadata": {"macfabric": {"router": router}}}))
    keys.write_text("family: 0123456789abcdef\n")
    keys.chmod(0o640)
    with pytest.raises(CommandError, match="chmod 600"):
        read_settings(path)
    keys.chmod(0o600)
    found = read_settings(path).router
    assert found.api_keys == {"family": "0123456789abcdef", "other": "fedcba9876543210"}
    assert found.api_keys_file == ""
    keys.write_text("family: fedcba9876543210\n")
    with pytest.raises(RejectedError, match="too"):
        read_settings(path)
    keys.write_text("family: 1234567890123456\n")
    with pytest.raises(CommandError, match="quotes"):
        read_settings(path)


@pytest.mark.parametrize(
    ("router", "text"),
    [
        ({"api_keys": {"a": "0123456789abcdef", "b": "0123456789abcdef"}}, "api_keys.a"),
        (
            {"api_keys": {"a": "0123456789abcdef"}, "operator_keys": {"b": "0123456789abcdef"}},
            "operator_keys.b",
        ),
        ({"api_keys": {"a": "0123456789abcdef", "b": f"sha256:{DIGEST.upper()}"}}, "api_keys.b"),
        ({"operator_keys": {"a": "short"}}, "16 characters"),
        ({"api_keys": {"a": "sha256:abc"}}, "64 hexadecimal"),
        ({"api_keys": {"a": "SHA256:" + "z" * 64}}, "64 hexadecimal"),
    ],
)
def test_invalid_or_duplicate_keys_are_rejected(router, text):
    with pytest.raises(RejectedError) as refused:
        parse_settings({"router": router})
    assert text in refused.value.message
    assert "0123456789" not in refused.value.message


def test_operator_may_use_a_name_reserved_for_tenants():
    settings = parse_settings({"router": {"operator_keys": {"_selftest": "0123456789abcdef"}}})
    assert list(settings.router.operator_keys) == ["_selftest"]


@pytest.fixture
def keyed(run, tmp_path, monkeypatch):
    """The shipped file with its keys, and a way to check it after a change."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(ROOT)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(SHIPPED))
    assert run("certs", "create", str(path))[0] == 0

    def check(spoil):
        path.write_text(yaml.safe_dump(spoiled_config(spoil)))
        found = json.loads(run("config", "check", str(path), "--json")[1])["findings"]
        return [(f["level"], f["where"], f["message"]) for f in found]

    return check


def test_matching_keys_have_no_findings(keyed):
    assert [f for f in keyed(lambda _: None) if "key" in f[1] and "ssh" not in f[1]] == []


def test_address_missing_from_certificate_is_found(keyed):
    found = keyed(lambda c: c["provider"]["worker_ips"].append("10.9.8.7"))

    where = "file_mounts.~/macfabric/keys"
    assert [f[0] for f in found if f[1] == where and "10.9.8.7" in f[2]] == ["error"]


def test_keys_dir_outside_the_mounts_is_found(keyed):
    found = keyed(lambda c: c["metadata"]["macfabric"].update(keys_dir="~/elsewhere"))

    assert ("error", "metadata.macfabric.keys_dir") in [f[:2] for f in found]


def test_shipped_api_keys_file_is_checked_at_its_local_source(keyed, tmp_path):
    shipped_file = {"api_keys_file": "~/macfabric/keys/api-keys.yaml"}

    def change(config):
        config["metadata"]["macfabric"]["router"].update(shipped_file)

    where = "metadata.macfabric.router.api_keys_file"
    assert [f[1] for f in keyed(change) if f[1] == where] == [where]
    file = tmp_path / "home/.macfabric/cluster/keys/api-keys.yaml"
    file.write_text("family: 0123456789abcdef\n")
    file.chmod(0o600)
    assert [f for f in keyed(change) if "metadata.macfabric.router" in f[1]] == []

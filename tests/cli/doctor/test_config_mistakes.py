"""`config check` reports each of 60 mistakes at its place, and all of them at once."""

import copy
import json
from pathlib import Path

import pytest
import yaml

from fabric.keys import SHIPPED_KEYS
from fabric.limits import GIB, MIB
from router.cli.config_file import compose, line_of, repeated_keys
from router.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = yaml.safe_load((ROOT / "cluster.yaml").read_text())
HEAD, WORKER = "head_start_ray_commands", "worker_start_ray_commands"
OURS = "metadata.macfabric"


def put(where: str, value: object):
    """Return a change that writes a value at a dotted path."""

    def change(config: dict) -> None:
        *path, last = where.split(".")
        for name in path:
            config = config.setdefault(name, {})
        config[last] = value

    return change


def drop(where: str):
    def change(config: dict) -> None:
        *path, last = where.split(".")
        for name in path:
            config = config[name]
        del config[last]

    return change


def swap(key: str, old: str, new: str):
    def change(config: dict) -> None:
        config[key] = [command.replace(old, new) for command in config[key]]

    return change


def finding(setting: str, value: object, level: str, text: str, where: str | None = None):
    return put(f"{OURS}.{setting}", value), level, f"{OURS}.{where or setting}", text


def worker_address(address: str, text: str):
    addresses = ["192.168.1.11", address]
    return put("provider.worker_ips", addresses), "error", "provider.worker_ips[1]", text


def combine(*changes):
    def change(config: dict) -> None:
        for each in changes:
            each(config)

    return change


KEY, DIGEST = "0123456789abcdef", "sha256:" + "0f" * 32
OPEN = combine(put(f"{OURS}.router.host", "0.0.0.0"), put(f"{OURS}.router.api_keys", {"a": DIGEST}))
# Mistake -> change, level, place and a part of the message.
MISTAKES = {
    # --- mistakes once missed, or reported elsewhere ---
    "model misspelt": finding("model", "recal", "error", "did you mean recall?"),
    "model of the hub": finding("model", "mlx-community/Qwen3-8B-4bit", "error", "hf download"),
    "model folder absent": finding("model", "/nowhere/Qwen3", "warning", "not a folder on this"),
    "hot_bytes in GiB": finding("node.hot_bytes", 8, "error", "8GiB?"),
    "hot_bytes of a TiB": finding("node.hot_bytes", 1024 * GIB, "error", "no Mac has"),
    "disk_bytes of a MiB": finding("node.disk_bytes", MIB, "error", "holds no agent"),
    "Ray's port": finding("router.port", 6379, "error", "used by Ray"),
    "port of ssh": finding("router.port", 22, "error", "used by ssh"),
    "port of http": finding("router.port", 80, "warning", "administrator"),
    "host with scheme": finding("router.host", "http://0.0.0.0", "error", "without scheme"),
    "host of a worker": finding("router.host", "192.168.1.11", "error", "is a worker"),
    "certificate absent": (
        put(f"{OURS}.router.tls", {"certificate": "/nowhere.pem", "key": "/nowhere.key"}),
        "warning", f"{OURS}.router.tls.certificate", "not on this machine"),
    "open without tls": (
        combine(OPEN, put(f"{OURS}.router.tls", {"mode": "never"})),
        "warning", f"{OURS}.router.tls.mode", "in clear text"),
    "alias of no model": (
        put(f"{OURS}.router.model_aliases", {"gpt": "qwen"}),
        "error", f"{OURS}.router.model_aliases.gpt", "called 'recall'"),
    "more replicas than Macs": finding("router.replicas", 7, "error", "Mac there are 2"),
    "more nodes than Macs": finding("router.nodes_expected", 9, "error", "names 3 Macs"),
    "two Macs that elect": (
        combine(put("provider.worker_ips", ["192.168.1.11"]), put(f"{OURS}.router.standby", True)),
        "warning", f"{OURS}.router.standby", "macfabric voter"),
    "a standby that reaches no other Mac": finding(
        "router.standby", True, "warning", "cannot forward", "router.host"),
    "template absent": finding("node.chat_template", "/nowhere.jinja", "warning", "not on this"),
    "parser misspelt": finding("node.tool_parser", "hermess", "error", "did you mean hermes?"),
    "share of no tenant": (
        combine(put(f"{OURS}.node.tenants", {"famly": {"quota": 0.5}}),
             put(f"{OURS}.router.api_keys", {"family": DIGEST})),
        "warning", f"{OURS}.node.tenants.famly", "did you mean family?"),
    "data_dir relative": finding("data_dir", "data", "error", "from / or ~"),
    "data_dir in /tmp": finding("data_dir", "/tmp/macfabric", "warning", "empties"),
    "disk_ttl_s in hours": finding("node.disk_ttl_s", 24, "warning", "24 seconds: 24h is a day"),
    "Macs sent away": (
        put("idle_timeout_minutes", 5), "warning", "idle_timeout_minutes", "525600 is a year"),
    "letter in an address": worker_address("192.168.1.1o", "is not an address"),
    "number over 255": worker_address("192.168.1.300", "is not an address"),
    "account in an address": worker_address("mac@192.168.1.12", "auth.ssh_user"),
    "port in an address": worker_address("192.168.1.12:22", "has a port"),
    "1,024 workers": (
        put("provider.worker_ips", [f"10.0.{n // 250}.{n % 250 + 1}" for n in range(1_024)]),
        "error", "provider.worker_ips", "at most 1024"),
    # --- other mistakes ---
    "key unknown to Ray": (put("worker_nodez", {}), "error", "Ray", "worker_nodez"),
    "a cloud": (put("provider.type", "aws"), "error", "provider.type", "must be local"),
    "provider key": (put("provider.bridge", "en5"), "error", "provider.bridge", "unknown"),
    "head as worker": worker_address("192.168.1.10", "names the head"),
    "worker twice": worker_address("192.168.1.11", "twice"),
    "max_workers": (put("max_workers", 1), "error", "max_workers", "leaves 1 of 2"),
    "min_workers": (put("min_workers", 0), "error", "min_workers", "leaves 2 of 2"),
    "no user": (drop("auth.ssh_user"), "error", "auth.ssh_user", "missing"),
    "no key": (drop("auth.ssh_private_key"), "error", "auth.ssh_private_key", "missing"),
    "key absent": (
        put("auth.ssh_private_key", "/nowhere/key"),
        "error", "auth.ssh_private_key", "does not exist"),
    "loopback head": (
        put("provider.head_ip", "127.0.0.1"), "error", "provider.head_ip", "resolves to itself"),
    "name on .local": (
        put("provider.head_ip", "studio.local"), "warning", "provider.head_ip", "use its"),
    "mount absent": (
        put("file_mounts", {"~/x": "./nowhere"}), "error", "file_mounts.~/x", "does not exist"),
    "broken shell": (
        lambda c: c["setup_commands"].append("if true; then"),
        "error", "setup_commands[1]", "not valid shell"),
    "no head": (swap(HEAD, "--head", ""), "error", HEAD, "ray start --head"),
    "no way to the head": (swap(WORKER, "RAY_HEAD_IP", "HEAD"), "error", WORKER, "$RAY_HEAD_IP"),
    "setting misspelt": finding("modle", "recall", "error", "did you mean model?"),
    "size in words": finding("node.hot_bytes", "8 gigs", "error", "such as 8589934592 or 8GiB"),
    "port too high": finding("router.port", 70_000, "error", "0-65535"),
    "port in words": finding("router.port", "http", "error", "must be a whole number, not 'http'"),
    "nothing at once": finding("node.active_max", 0, "error", "1-32"),
    "durability": finding("node.durability", "fsync", "error", "full|barrier|none"),
    "encrypt_links": finding("node.encrypt_links", "yes", "error", "auto|always|never"),
    "kv_bits": finding("node.kv_bits", {"full": 5}, "error", "4 or 8"),
    "short key": finding("router.api_keys", {"a": "x"}, "error", "16 char", "router.api_keys.a"),
    "one key for two": (
        put(f"{OURS}.router.api_keys", {"a": DIGEST, "b": DIGEST}),
        "error", f"{OURS}.router.api_keys.b", "api_keys.a, too"),
    "keys_dir elsewhere": finding("keys_dir", "~/elsewhere", "error", "where the keys are"),
    "Mac without certificate": (
        put("provider.worker_ips", ["192.168.1.11", "192.168.1.99"]),
        "error", f"file_mounts.{SHIPPED_KEYS}", "192.168.1.99"),
    "policy misspelt": (
        put(f"{OURS}.router.policies", [{"use": "truncate"}]),
        "error", f"{OURS}.router.policies[0].use", "neither module:Class"),
    "reserved option": (
        put(f"{OURS}.node.template_options", {"tools": []}),
        "error", f"{OURS}.node.template_options.tools", "belongs to the node"),
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home with an ssh key and the keys of `certs create` for the shipped file."""
    home = tmp_path_factory.mktemp("home")
    (home / ".ssh").mkdir()
    (home / ".ssh" / "macfabric").touch()
    file = home / "cluster.yaml"
    file.write_text(yaml.safe_dump(sound_config()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        assert main(["certs", "create", str(file)]) == 0
    return home


def sound_config() -> dict:
    """The shipped file without the mounts of a checkout, which holds compiled files."""
    config = copy.deepcopy(SHIPPED)
    config["file_mounts"] = {SHIPPED_KEYS: SHIPPED["file_mounts"][SHIPPED_KEYS]}
    return config


@pytest.fixture
def check(run, home, tmp_path, monkeypatch):
    """Check a changed file; return the exit status, the findings, and the text output."""
    monkeypatch.setenv("HOME", str(home))
    path = tmp_path / "cluster.yaml"

    def call(*changes):
        config = sound_config()
        for change in changes:
            change(config)
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        status, out, err = run("config", "check", str(path), "--json")
        assert err == ""
        text_status, text, _ = run("config", "check", str(path))
        assert text_status == status
        return status, json.loads(out)["findings"], text

    call.path = path
    return call


def test_valid_file_has_no_findings(check):
    status, findings, text = check()

    assert (status, findings) == (0, [])
    assert text == f"{check.path} is fine; `ray up {check.path}` accepts it\n"


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_found_at_its_place(check, name):
    change, level, where, text = MISTAKES[name]
    status, findings, shown = check(change)
    found = [f for f in findings if (f["level"], f["where"]) == (level, where)
             and text in f["message"]]  # fmt: skip

    assert len(found) == 1, findings
    assert status == (level == "error" or any(f["level"] == "error" for f in findings))
    assert "is fine" not in shown
    last = where.replace("[", ".").split(".")[-1].rstrip("]")
    if where != "Ray" and "missing" not in text:
        line = check.path.read_text().splitlines()[found[0]["line"] - 1]
        assert last in line or line.lstrip().startswith("- "), line
        assert f"{check.path}:{found[0]['line']}: {level}: {where}: " in shown


def test_number_of_mistakes_matches_documentation():
    assert len(MISTAKES) == 60


def test_all_mistakes_are_reported_at_once(check):
    apart = {"model of the hub", "model folder absent", "hot_bytes of a TiB", "size in words",
             "Ray's port", "port of ssh", "port of http", "port too high", "host of a worker",
             "key absent", "no key", "setting misspelt", "number over 255", "1,024 workers",
             "account in an address", "port in an address", "head as worker", "worker twice",
             "loopback head", "data_dir in /tmp", "a cloud", "Mac without certificate",
             "keys_dir elsewhere", "policy misspelt", "open without tls", "host with scheme",
             "short key", "one key for two", "key unknown to Ray", "share of no tenant",
             "mount absent", "no way to the head", "two Macs that elect"}  # fmt: skip
    chosen = {name: mistake for name, mistake in MISTAKES.items() if name not in apart}
    findings = check(*(change for change, *_ in chosen.values()))[1]
    places = {(f["level"], f["where"]) for f in findings}

    assert len(chosen) >= 25
    assert [
        name for name, (_, level, where, _) in chosen.items() if (level, where) not in places
    ] == []


def test_duplicate_key_is_found(run, home, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(sound_config()) + "max_workers: 2\n")
    findings = json.loads(run("config", "check", str(path), "--json")[1])["findings"]

    (found,) = findings
    assert (found["where"], found["level"]) == ("max_workers", "error")
    assert found["line"] == len(path.read_text().splitlines())


def test_line_numbers_of_dotted_paths_and_list_items(tmp_path):
    path = tmp_path / "file.yaml"
    path.write_text("a:\n  b.c/d:\n    - x\n    - y: 1\n  e: 2\n")
    tree = compose(path)

    assert [line_of(tree, where) for where in ("a", "a.b.c/d", "a.b.c/d[1].y", "a.e")] == [
        1,
        2,
        4,
        5,
    ]
    assert [line_of(tree, where) for where in ("a.b.c/d[7]", "a.none", "none")] == [2, 1, None]
    path.write_text("a: 1\nb: {c: 1, c: 2}\na: 2\n")
    assert list(repeated_keys(compose(path))) == [("b.c", 2), ("a", 3)]


def test_file_with_warnings_only_is_accepted_with_a_note(check):
    status, _, text = check(MISTAKES["data_dir in /tmp"][0])

    assert status == 0
    assert text.splitlines()[-1] == (
        f"{check.path}: 1 warning; `ray up {check.path}` accepts it, but look at that first"
    )

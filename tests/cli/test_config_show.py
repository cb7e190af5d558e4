"""`macfabric config show`: every setting, the origin of its value, and never a key."""

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from fabric.settings import FabricSettings
from router.cli.commands import build_parser
from router.cli.config_show import plain_rows
from router.cli.data_folder import DataFolder
from router.cli.up import _settings
from router.supervise.processes import identify

KEY, KEY_OF_TWO, KEY_OF_OPS, TOKEN = ("a" * 32, "b" * 32, "c" * 32, "very-private")
CONFIG = f"""cluster_name: x
metadata:
  macfabric:
    node:
      hot_bytes: 8GiB
      kv_bits: {{full: 8}}
      encrypt_links:   # the default, written out
        auto
    router:
      port: 8123
      api_keys:
        one: {KEY}
      api_keys_file: KEYS
      operator_keys: {{ops: {KEY_OF_OPS}}}
      policies:
        - use: "mine:Policy"
          options: {{api_token: {TOKEN}, keep: 3}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.delenv("MACFABRIC_API_KEY", raising=False)
    keys = tmp_path / "keys.yaml"
    keys.touch(mode=0o600)
    keys.write_text(f"two: {KEY_OF_TWO}\n")
    path = tmp_path / "cluster.yaml"
    path.write_text(CONFIG.replace("KEYS", str(keys)))
    return path


def settings(run, *argv):
    """Return the rows that `config show --json` prints, by name."""
    status, out, err = run("config", "show", "--json", *argv)
    assert (status, err) == (0, "")
    return {row["name"]: row for row in json.loads(out)["settings"]}


def names_of(kind, prefix=""):
    for field in fields(kind):
        value = getattr(kind, field.name)
        if is_dataclass(value):
            yield from names_of(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def test_every_setting_is_listed_with_its_default(run, monkeypatch):
    monkeypatch.delenv("MACFABRIC_DATA")
    rows = settings(run)

    assert list(rows) == list(names_of(FabricSettings()))
    assert {row["origin"]["kind"] for row in rows.values()} == {"default"}
    assert rows["router.port"]["value"] == 8000
    assert rows["node.hot_bytes"]["value"] is None


def test_settings_of_a_file_have_its_lines(run, config):
    rows = settings(run, str(config))
    lines = config.read_text().splitlines()
    written = {name: row["origin"] for name, row in rows.items() if row["origin"]["kind"] == "file"}

    assert set(written) == {
        *("node.hot_bytes", "node.kv_bits.full", "node.encrypt_links", "router.port"),
        *("router.api_keys.one", "router.api_keys_file", "router.operator_keys.ops"),
        "router.policies",
    }
    for name, origin in written.items():
        assert origin["place"] == str(config)
        assert name.rpartition(".")[2] + ":" in lines[origin["line"] - 1]
    assert rows["node.hot_bytes"]["value"] == 8 << 30


def test_keys_and_secrets_are_never_shown(run, config, monkeypatch):
    monkeypatch.setenv("MACFABRIC_API_KEY", "d" * 32)
    rows = settings(run, str(config))
    kept = Path(rows["router.api_keys_file"]["value"])
    origins = {name: row["origin"]["place"] for name, row in rows.items() if row["value"] == "set"}
    _, text, _ = run("config", "show", str(config))

    assert origins == {
        "router.api_keys.default": "MACFABRIC_API_KEY",
        "router.api_keys.one": str(config),
        "router.api_keys.two": str(kept),
        "router.operator_keys.ops": str(config),
    }
    shown = text + json.dumps(list(rows.values()))
    secrets = (KEY, KEY_OF_TWO, KEY_OF_OPS, TOKEN, "d" * 32)
    assert [secret for secret in secrets if secret in shown] == []
    assert rows["router.policies"]["value"][0]["options"] == {"api_token": "set", "keep": 3}


def test_text_form_has_value_and_origin(run, config):
    status, out, err = run("config", "show", str(config))
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines()}

    assert status == 0
    assert f"a start with {config}" in err
    assert lines["node.hot_bytes"] == ["8.0", "GiB", f"{config}:5"]
    assert lines["node.disk_ttl_s"] == ["86400", "default"]
    assert lines["node.scrub_bytes_per_s"] == ["16.0", "MiB/s", "default"]
    assert lines["router.cors_origins"] == ["none", "default"]
    assert lines["router.standby"] == ["false", "default"]


def test_changed_leaves_out_defaults(run, config):
    rows = settings(run, str(config), "--changed")

    assert "node.disk_bytes" not in rows
    assert {"router.port", "data_dir"} <= set(rows)
    assert rows["data_dir"]["origin"]["place"] == "MACFABRIC_DATA"


def test_key_file_of_another_machine_is_a_warning(run, config):
    Path(settings(run, str(config))["router.api_keys_file"]["value"]).unlink()
    status, out, err = run("config", "show", str(config))

    assert status == 0
    assert "router.api_keys.one" in out
    assert "router.api_keys.two" not in out
    assert "warning: the keys of key files are not shown" in err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("metadata: {macfabric: {router: {prot: 1}}}", "did you mean port"),
        ("metadata: [", "not valid YAML"),
    ],
)
def test_invalid_file_is_misuse(run, tmp_path, text, problem):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    status, out, err = run("config", "show", str(path))

    assert (status, out) == (2, "")
    assert problem in err


def test_options_of_up_are_origins(config, monkeypatch, tmp_path):
    monkeypatch.setenv("MACFABRIC_DATA", str(tmp_path / "elsewhere"))
    argv = ["up", "--port", "0", "--nodes", "2", "--model", "recall", "--allow-host", "Box"]
    argv += ["--api-key", "e" * 32, "--data", str(tmp_path), "--config", str(config)]
    arguments = build_parser(argv).parse_args(argv)
    whole, _ = _settings(arguments, type("Quiet", (), {"say": lambda *_: None})())
    rows = {row["name"]: row for row in plain_rows(whole, "up", arguments)}
    places = {name: row["origin"]["place"] for name, row in rows.items()}

    assert rows["router.allowed_hosts"]["value"] == ["box"]
    assert rows["local_nodes"]["value"] == ["node-a", "node-b"]
    assert (rows["data_dir"]["value"], places["data_dir"]) == (str(tmp_path), "up --data")
    assert {places[name] for name in ("router.port", "local_nodes", "model")} == {
        *("up --port", "up --nodes", "up --model"),
    }
    assert places["router.api_keys.default"] == "up --api-key"
    assert places["router.api_keys.two"].endswith("keys.yaml")
    assert places["router.host"] == ""


def test_running_fabric_shows_its_start_settings(run, tmp_path):
    folder = DataFolder(tmp_path / "data")
    folder.create()
    row = {"name": "model", "value": "prose", "origin": {"kind": "option", "place": "up --model"}}
    folder.write_setting_rows([row])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as starter:
        folder.write_run(identify(starter.pid), {}, None)
        shown = json.loads(run("config", "show", "--json")[1])
        text = run("config", "show")
        (folder.path / "settings.json").unlink()
        forgotten = run("config", "show")
        starter.stdin.close()

    assert shown == {"source": "running", "data": str(folder.path), "settings": [row]}
    assert text[1].split() == ["model", "prose", "up", "--model"]
    assert (forgotten[0], forgotten[1]) == (1, "")
    assert "restart the fabric" in forgotten[2]
    assert json.loads(run("config", "show", "--json")[1])["source"] == "planned"

"""`macfabric up` and `serve` refuse impossible settings before they start anything."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save

from router.cli.errors import CommandError
from router.cli.model_choice import chosen_model

WEIGHTS = save({"x": np.zeros(64, np.float32)})
ROOT = Path(__file__).resolve().parents[2]


def up(data, *options):
    """Run `up` on a folder; it must end by itself, with nothing started."""
    return run("up", data, *options)


def run(command, data, *options, cwd=ROOT):
    ran = subprocess.run(
        [sys.executable, "-m", "router.cli.main", command, "--port=0", f"--data={data}", *options],
        cwd=cwd,
        env=os.environ | {"HOME": str(data)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in ran.stderr
    assert not list((data / "logs").glob("ray-*.log"))
    assert not (data / "run.json").exists()
    return ran.returncode, ran.stderr


def test_up_refuses_empty_model_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    status, err = up(tmp_path, "--model", str(tmp_path / "empty"))

    assert (status, "has no config.json" in err) == (2, True)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("nonsense", "there is no such folder, and no bundled model of that name"),
        ("{tmp}/empty", "the folder has no config.json"),
        ("{tmp}/weightless", "the folder has no weights"),
        ("mine", "write an absolute path, from / or ~"),
    ],
)
def test_serve_refuses_unloadable_model_of_its_file(tmp_path, model, why, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("weightless", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "mine" / "model.safetensors").write_bytes(WEIGHTS)
    chosen = model.format(tmp=tmp_path)
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"metadata": {"macfabric": {"model": chosen}}}))
    data = tmp_path / "data"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status, err = run("serve", data, "--config", str(config), cwd=tmp_path)

    assert (status, f"macfabric.model {chosen}: {why}" in err) == (2, True), err
    assert not data.exists(), "nothing was started"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("nonsense", "no bundled model of that name"),
        ("org/model-4bit", "no such folder"),
        ("", "no such folder|has no config.json"),
        ("{tmp}/weightless", "has no weights"),
        ("{tmp}/weightless/config.json", "no such folder"),
    ],
)
def test_invalid_models_are_refused(tmp_path, model, why, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")

    with pytest.raises(CommandError, match=why):
        chosen_model(model.format(tmp=tmp_path))


def test_valid_models_are_accepted(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine" / "model.safetensors").write_bytes(WEIGHTS)
    monkeypatch.chdir(tmp_path)

    assert chosen_model("recall") == "recall"
    assert chosen_model("prose") == "prose"
    assert chosen_model("mine") == str(tmp_path / "mine")


BROKEN = {
    "cut short": ({"model.safetensors": WEIGHTS[:-1]}, "model.safetensors is truncated"),
    "empty": ({"model.safetensors": b""}, "model.safetensors is truncated"),
    "a pointer": ({"model.safetensors": b"version https://git-lfs.github.com/spec/v1"}, "git lfs"),
    "the second of two": ({"a.safetensors": WEIGHTS, "b.safetensors": b"x" * 99}, "b.safetensors"),
    "a shard that is missing": (
        {
            "model-1.safetensors": WEIGHTS,
            "model.safetensors.index.json": b'{"weight_map": {"x": "model-1.safetensors", '
            b'"y": "model-2.safetensors"}}',
        },
        "model-2.safetensors is missing",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_incomplete_weights_are_refused(tmp_path, name):
    files, why = BROKEN[name]
    for file, raw in ({"config.json": b"{}"} | files).items():
        (tmp_path / file).write_bytes(raw)

    with pytest.raises(CommandError, match=why):
        chosen_model(str(tmp_path))


def test_complete_sharded_weights_are_accepted(tmp_path):
    index = b'{"weight_map": {"x": "model-1.safetensors"}}'
    files = {"config.json": b"{}", "model-1.safetensors": WEIGHTS}
    for file, raw in (files | {"model.safetensors.index.json": index}).items():
        (tmp_path / file).write_bytes(raw)

    assert chosen_model(str(tmp_path)) == str(tmp_path.resolve())


@pytest.mark.parametrize("key", ["nonsense", "abcd", ""])
def test_invalid_cluster_key_is_refused(tmp_path, key):
    (tmp_path / "cluster.key").write_text(key)
    (tmp_path / "cluster.key").chmod(0o600)
    status, err = up(tmp_path)

    assert status == 1
    assert f"{tmp_path / 'cluster.key'} is not a cluster key" in err


def test_lock_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "lock").mkdir()
    status, err = up(tmp_path)

    assert status == 1
    assert f"{tmp_path / 'lock'} cannot be locked: Is a directory" in err

"""What cannot work is said by `macfabric up` and `serve` before they start anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from router.cli.errors import CommandError
from router.cli.model_choice import chosen_model

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


def test_a_model_that_nobody_can_load(tmp_path):
    (tmp_path / "empty").mkdir()
    status, told = up(tmp_path, "--model", str(tmp_path / "empty"))

    assert (status, "holds no config.json" in told) == (2, True)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("nonsense", "there is no such folder, and no bundled model of that name"),
        ("{tmp}/empty", "that folder holds no config.json"),
        ("{tmp}/weightless", "that folder holds no weights"),
        ("mine", "name the folder from / or ~ on"),
    ],
)
def test_serve_says_the_same_of_the_model_of_its_file(tmp_path, model, why, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name in ("weightless", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "mine" / "model.safetensors").touch()
    chosen = model.format(tmp=tmp_path)
    config = tmp_path / "cluster.yaml"
    config.write_text(yaml.safe_dump({"metadata": {"macfabric": {"model": chosen}}}))
    data = tmp_path / "data"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    status, told = run("serve", data, "--config", str(config), cwd=tmp_path)

    assert (status, f"macfabric.model {chosen}: {why}" in told) == (2, True), told
    assert not data.exists(), "nothing was begun"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("nonsense", "no bundled model of that name"),
        ("org/model-4bit", "no such folder"),
        ("", "no such folder|holds no config.json"),
        ("{tmp}/weightless", "holds no weights"),
        ("{tmp}/weightless/config.json", "no such folder"),
    ],
)
def test_models_that_are_none(tmp_path, model, why, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")

    with pytest.raises(CommandError, match=why):
        chosen_model(model.format(tmp=tmp_path))


def test_models_that_are_some(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)

    assert chosen_model("recall") == "recall"
    assert chosen_model("prose") == "prose"
    assert chosen_model("mine") == str(tmp_path / "mine")


@pytest.mark.parametrize("key", ["nonsense", "abcd", ""])
def test_a_broken_cluster_key(tmp_path, key):
    (tmp_path / "cluster.key").write_text(key)
    (tmp_path / "cluster.key").chmod(0o600)
    status, told = up(tmp_path)

    assert status == 1
    assert f"{tmp_path / 'cluster.key'} is no cluster key" in told


def test_a_lock_that_is_a_folder(tmp_path):
    (tmp_path / "lock").mkdir()
    status, told = up(tmp_path)

    assert status == 1
    assert f"{tmp_path / 'lock'} cannot be locked: Is a directory" in told

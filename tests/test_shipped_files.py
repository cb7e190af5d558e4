"""`ray up` ships sources to Macs and no generated files."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fabric.keys import CLUSTER_FILE_KEYS, SHIPPED_KEYS

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = yaml.safe_load((ROOT / "cluster.yaml").read_text())


@pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
def test_only_sources_are_shipped(tmp_path):
    source, target = tmp_path / "from", tmp_path / "to"
    kept = {"x.py", "mlx/y.py", "bundled/recall/model.safetensors"}
    left = {"__pycache__/x.cpython-312.pyc", "mlx/__pycache__/y.pyc", "old.pyc", ".DS_Store"}
    for name in kept | left:
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    excluded = [f"--exclude={pattern}" for pattern in SHIPPED["rsync_exclude"]]
    subprocess.run(["rsync", "-rlptD", *excluded, f"{source}/", str(target)], check=True)

    found = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert found == kept


def test_mounted_files_exist_and_suffice_to_install():
    mounts = SHIPPED["file_mounts"]
    here = {local for local in mounts.values() if not local.startswith("~")}

    assert [local for local in here if not (ROOT / local).exists()] == []
    assert {"./fabric", "./node", "./router", "./pyproject.toml", "./constraints.txt"} == here
    assert set(mounts.values()) - here == {CLUSTER_FILE_KEYS}
    assert mounts[SHIPPED_KEYS] == CLUSTER_FILE_KEYS

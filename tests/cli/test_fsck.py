"""`macfabric fsck` starts the nodes' own check and passes on its result."""

import json

import pytest

from router.cli.main import main
from tests.support.folders import make_folder


@pytest.fixture
def run(capfd, monkeypatch):
    """Run the command, whose child writes to the file descriptors; return status and outputs."""

    def call(*argv: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(argv)
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return call


@pytest.fixture
def stored(tmp_path):
    return make_folder(tmp_path / "data")


def test_fsck_reports_and_repairs_damage(run, stored, tmp_path):
    data = f"--data={tmp_path / 'data'}"
    status, out, _ = run("fsck", data)
    assert status == 0
    assert "node-a/6666666666666666 of mixed: 2 records, 6 blocks" in out

    raw = bytearray(stored.path("tail").read_bytes())
    raw[-1] ^= 1
    stored.path("tail").write_bytes(raw)
    status, out, _ = run("fsck", data, "--json", "--node", "node-a")
    [folder] = json.loads(out)["folders"]
    assert status == 1
    assert folder["problems_left"] == 2
    status, out, _ = run("fsck", data, "--repair")
    assert status == 0
    assert "(repaired)" in out
    assert run("fsck", data)[0] == 0


def test_fsck_uses_the_fabrics_data_folder_by_default(run, stored, tmp_path, monkeypatch):
    monkeypatch.setenv("MACFABRIC_DATA", str(tmp_path / "data"))
    assert run("fsck")[0] == 0
    monkeypatch.setenv("MACFABRIC_DATA", str(tmp_path / "nowhere"))
    status, out, err = run("fsck")
    assert (status, out) == (2, "")
    assert "no node has stored anything" in err

"""The offline check as a command: refusals, folders, output."""

import json
import shutil

import pytest

from node.fsck import run
from node.fsck.report import Kind
from tests.support.folders import make_folder, opened, tree


@pytest.fixture
def stored(tmp_path):
    return make_folder(tmp_path / "data")


def test_folder_in_use_is_refused(stored, capsys):
    with opened(stored.root) as disk:
        disk.recover()
        before = tree(stored.root)
        status = run.main([f"--data={stored.root.parents[2]}", "--repair"])
        printed = capsys.readouterr()

    assert (status, printed.out) == (2, "")
    assert "in use" in printed.err
    assert tree(stored.root) == before


@pytest.mark.parametrize(
    "argv",
    [["--node=node-z"], ["--node=../.."], ["--node=NODE"], ["--fly"], ["--data=/nowhere"]],
)
def test_invalid_arguments_are_refused(stored, tmp_path, argv, capsys):
    try:
        status = run.main([f"--data={tmp_path / 'data'}", *argv])
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err


def test_every_node_and_model_is_checked(stored, tmp_path, capsys):
    make_folder(tmp_path / "data", "node-b")
    shutil.copytree(stored.root, stored.root.parent / ("0" * 16))
    status = run.main([f"--data={tmp_path / 'data'}"])
    out = capsys.readouterr().out

    assert status == 1
    assert "node-b/6666666666666666 of mixed: 2 records, 6 blocks" in out
    assert f"node-a/{'0' * 16}: 0 records" in out
    assert "record of another model" in out


def test_number_of_findings_is_bounded(stored, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("node.fsck.report.FSCK_FINDINGS_MAX", 3)
    for index in range(10):
        path = stored.root / "blocks" / f"{index:064}-{'0' * 32}.full"
        path.write_bytes(b"x")
        path.chmod(0o644)
    status = run.main([f"--data={tmp_path / 'data'}", "--json"])
    [report] = json.loads(capsys.readouterr().out)["folders"]

    assert status == 1
    assert len(report["findings"]) == 3
    assert report["findings_left_out"] == 17
    assert report["problems_left"] == 20
    assert {f["kind"] for f in report["findings"]} == {Kind.WRONG_MODE}

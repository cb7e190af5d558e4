"""Texts come from the scenario's folder only."""

import os

import pytest

from fabric.errors import RejectedError
from router.limits import SCENARIO_FILE_BYTES_MAX
from router.scenario.diagnostics import ScenarioError
from router.scenario.source import ScenarioFolder, read_scenario_file

FILE = """\
scenario: s
agents: {a: {}}
phases: [{id: p, agents: [a], prompts: {a: {file: %s}}}]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    inside = tmp_path / "inside"
    (inside / "texts").mkdir(parents=True)
    (inside / "texts" / "a.txt").write_text("Told: ${x}\n")
    (inside / "s.yaml").write_text(FILE % "texts/a.txt")
    return inside


def test_text_file_is_read_verbatim(folder):
    scenario = read_scenario_file(folder / "s.yaml")
    assert scenario.phases[0].prompts["a"].parts == ("Told: ${x}\n",)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../secret.txt", "leads out of"),
        ("texts/../../secret.txt", "leads out of"),
        ("/etc/hostname", "leads out of"),
        ("..\\secret.txt", "leads out of"),
        ("link", "a link out of"),
        ("linked/secret.txt", "a link out of"),
        ("circle", "cannot be read"),
        ("texts", "cannot be read|not a regular file"),
        ("pipe", "not a regular file"),
        ("nowhere.txt", "cannot be read: No such file"),
        ("n" * 300, "cannot be read: File name too long"),
        ("large", "has more than"),
        ("bytes", "not UTF-8"),
    ],
)
def test_file_names_cannot_escape_the_folder(folder, name, why):
    (folder / "link").symlink_to(folder.parent / "secret.txt")
    (folder / "linked").symlink_to(folder.parent)
    (folder / "circle").symlink_to(folder / "circle")
    os.mkfifo(folder / "pipe")
    (folder / "large").write_bytes(b"x" * (SCENARIO_FILE_BYTES_MAX + 1))
    (folder / "bytes").write_bytes(b"\xff")
    with pytest.raises(RejectedError, match=why):
        ScenarioFolder(folder)(name)


def test_missing_file_is_reported_with_its_position(folder):
    (folder / "s.yaml").write_text(FILE % "texts/b.txt")
    with pytest.raises(
        ScenarioError, match=r"^s\.yaml:3:\d+: phases\[0\]\.prompts\.a\.file: 'texts/b"
    ):
        read_scenario_file(folder / "s.yaml")
    with pytest.raises(RejectedError, match="No such file"):
        read_scenario_file(folder / "t.yaml")


def test_text_files_are_cached_and_counted(folder):
    texts = ScenarioFolder(folder)
    for n in range(64):
        (folder / f"{n}").write_text("x")
        texts(f"{n}")
    assert texts("0") == "x"
    with pytest.raises(RejectedError, match="more than 64 files"):
        texts("texts/a.txt")

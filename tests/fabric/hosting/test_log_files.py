"""Log files: JSON lines with turns, rotated, without texts of exceptions."""

import json
import logging

import pytest

from fabric.errors import FabricError
from fabric.hosting import log_files
from fabric.hosting.log_files import add_log_file, last_lines, read_tail
from fabric.hosting.turn_context import about_turn
from fabric.ids import TurnId

LOG = logging.getLogger("node.turn.turn")
SECRET = "the vault code is 4711"


@pytest.fixture
def begin_logging(tmp_path):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level

    def begin(form="json"):
        return add_log_file(tmp_path / "logs" / "node.a", "a", form)

    yield begin
    for handler in [each for each in root.handlers if each not in before]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def log_error(error):
    def fail():
        raise error

    try:
        fail()
    except type(error):
        LOG.exception("a turn failed")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_name_process_and_turn(begin_logging):
    path = begin_logging()
    with about_turn(TurnId("req_12345678")):
        LOG.info("agent %s: served", "ab12")
    LOG.warning("no turn")
    first, second = rows(path)
    assert (first["process"], first["turn"], first["level"]) == ("a", "req_12345678", "info")
    assert first["message"] == "agent ab12: served"
    assert "turn" not in second
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("form", ["json", "text"])
def test_texts_of_exceptions_are_not_written(begin_logging, form):
    path = begin_logging(form)
    log_error(ValueError(SECRET))
    text = path.read_text()
    assert SECRET not in text
    assert "ValueError" in text
    assert "test_log_files.py:" in text
    assert "Traceback" not in text


def test_code_of_own_errors_is_written(begin_logging):
    path = begin_logging()
    log_error(FabricError(SECRET, code="disk_refuses"))
    (row,) = rows(path)
    assert (row["error"], row["code"]) == ("FabricError", "disk_refuses")
    assert SECRET not in path.read_text()


def test_files_are_rotated_within_their_limits(begin_logging, monkeypatch):
    monkeypatch.setattr(log_files, "LOG_FILE_BYTES_MAX", 2_000)
    monkeypatch.setattr(log_files, "LOG_FILES_MAX", 3)
    path = begin_logging()
    for number in range(200):
        LOG.info("line %d %s", number, "x" * 100)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["node.a.jsonl", "node.a.jsonl.1", "node.a.jsonl.2"]
    assert all(file.stat().st_size <= 2_000 for file in files)
    assert last_lines(path)[-1].startswith("info: line 199 ")


def test_information_of_other_libraries_is_not_written(begin_logging):
    path = begin_logging()
    logging.getLogger("urllib3.pool").info("not ours")
    logging.getLogger("urllib3.pool").warning("but warnings are")
    assert [row["message"] for row in rows(path)] == ["but warnings are"]


def test_no_file_without_a_form_or_a_folder(begin_logging, tmp_path):
    assert begin_logging("none") is None
    (tmp_path / "logs").write_text("a file in the folder's place")
    assert begin_logging() is None


def test_tail_skips_incomplete_and_invalid_lines(tmp_path):
    path = tmp_path / "router.jsonl"
    path.write_bytes(b'not json\n{"message": "one"}\n[]\n\xff\n{"message": "two"}\n{"mess')
    assert [row["message"] for row in read_tail(path, 5)] == ["one", "two"]
    assert list(read_tail(tmp_path / "none", 5)) == []

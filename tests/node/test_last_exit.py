"""Records of how the previous process of a node ended."""

import json
import subprocess
import sys

import pytest

from fabric.control.usage_view import CRASHED, KILLED, OUT_OF_MEMORY, STOPPED
from node.last_exit import MARK, ExitWatch, PreviousLog
from tests.support.clocks import ManualClock


def watch(folder, clock, kills=lambda: 3):
    return ExitWatch(folder, clock, kills)


def test_first_run_has_no_previous_exit(tmp_path):
    assert watch(tmp_path, ManualClock()).begin() is None


def test_stop_on_request_is_no_crash(tmp_path):
    clock = ManualClock()
    first = watch(tmp_path, clock)
    first.begin()
    clock.now_s += 5
    first.note_end()
    ended = watch(tmp_path, clock).begin(PreviousLog(("info: the last line",)))
    assert (ended.cause, ended.lines, ended.at_s) == (STOPPED, (), clock.wall_s())


def test_end_without_a_trace_has_the_last_lines_and_the_last_time(tmp_path):
    clock = ManualClock()
    first = watch(tmp_path, clock)
    first.begin()
    clock.now_s += 60
    first.note_alive()
    seen_s = clock.wall_s()
    clock.now_s += 30
    ended = watch(tmp_path, clock).begin(PreviousLog(tuple(f"info: line {n}" for n in range(30))))
    assert (ended.cause, ended.at_s) == (KILLED, seen_s)
    assert ended.lines == tuple(f"info: line {n}" for n in range(10, 30))


def test_kill_for_lack_of_memory_is_named(tmp_path):
    watch(tmp_path, ManualClock(), kills=lambda: 3).begin()
    assert watch(tmp_path, ManualClock(), kills=lambda: 4).begin().cause == OUT_OF_MEMORY


def test_failing_device_is_named(tmp_path):
    first = watch(tmp_path, ManualClock())
    first.begin()
    first.note_end(CRASHED, "its device kept failing")
    ended = watch(tmp_path, ManualClock()).begin(PreviousLog(("error: the device failed",)))
    assert (ended.cause, ended.detail) == (CRASHED, "its device kept failing")
    assert ended.lines == ("error: the device failed",)


def test_fatal_signal_leaves_its_name(tmp_path):
    watch(tmp_path, ManualClock()).begin()
    program = (
        "import ctypes, pathlib, sys; from node.last_exit import take_log;"
        "print(take_log(pathlib.Path(sys.argv[1])).crash); sys.stdout.flush(); ctypes.string_at(0)"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "node.a.jsonl")]
    first, second = (subprocess.run(argv, check=False, capture_output=True) for _ in range(2))
    crash = second.stdout.decode().strip()
    ended = watch(tmp_path, ManualClock()).begin(PreviousLog(("info: x",), crash))
    assert (first.returncode < 0, first.stdout.strip()) == (True, b"")
    assert (ended.cause, ended.lines) == (CRASHED, ("info: x",))
    assert ended.detail == "Fatal Python error: Segmentation fault"


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b'{"began_s": "x", "seen_s": 1}', b"\xff"])
def test_damaged_mark_counts_as_none(tmp_path, raw):
    (tmp_path / MARK).write_bytes(raw)
    assert watch(tmp_path, ManualClock()).begin() is None
    assert json.loads((tmp_path / MARK).read_text())["cause"] is None

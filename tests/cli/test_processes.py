"""Processes are identified by pid and start time, and ended with their descendants."""

import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta

import pytest

from router.supervise import processes
from router.supervise.processes import (
    ProcessId,
    descendants,
    end,
    from_record,
    identify,
    is_alive,
    session_members,
    to_record,
)

SLEEPER = "import time; time.sleep(60)"
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def spawn():
    started = []

    def start(code: str) -> subprocess.Popen[str]:
        popen = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(popen)
        return popen

    yield start
    for popen in started:
        popen.kill()
        popen.wait()
        popen.stdout.close()


def test_live_process_has_an_identity(spawn):
    popen = spawn(SLEEPER)
    process = identify(popen.pid)

    assert process is not None
    assert process.pid == popen.pid
    assert is_alive(process)


def test_reused_pid_is_a_different_process(spawn):
    popen = spawn(SLEEPER)
    stranger = ProcessId(popen.pid, "long ago")

    assert not is_alive(stranger)
    assert end([stranger], 0.1) == []
    assert popen.poll() is None


def test_zombie_is_dead(spawn):
    popen = spawn("pass")
    process = identify(popen.pid)
    deadline_s = time.monotonic() + 60
    while identify(popen.pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)

    assert identify(popen.pid) is None
    assert process is None or not is_alive(process)


def test_descendants_are_found_across_sessions(spawn):
    parent = spawn(PARENT)
    child = int(parent.stdout.readline())

    assert [process.pid for process in descendants([parent.pid])] == [child]


def test_end_includes_descendants(spawn):
    parent = spawn(PARENT)
    child = identify(int(parent.stdout.readline()))

    assert end([identify(parent.pid)], 2.0) == []
    assert not is_alive(child)


def test_session_members_are_found_by_their_leader(spawn):
    parent = spawn(PARENT.replace(", start_new_session=True", ""))
    leader = identify(parent.pid)
    child = identify(int(parent.stdout.readline()))

    assert {p.pid for p in session_members([leader])} == {parent.pid, child.pid}
    assert session_members([ProcessId(leader.pid, "long ago")]) == []

    parent.kill()
    parent.wait()

    assert session_members([leader]) == [child]
    assert end([leader], 0.1) == []
    assert not is_alive(child)


def test_end_kills_process_that_ignores_sigterm(spawn):
    popen = spawn(STUBBORN)
    popen.stdout.readline()
    began_s = time.monotonic()

    assert end([identify(popen.pid)], 0.2) == []
    assert time.monotonic() - began_s < 30
    assert popen.wait() == -signal.SIGKILL


def test_process_record_round_trips():
    process = identify(os.getpid())

    assert from_record(to_record(process)) == process


@pytest.mark.parametrize(
    "record", [None, 7, {}, {"pid": "7", "started": "x"}, {"pid": 1, "started": "x"}, {"pid": 7}]
)
def test_damaged_record_is_no_process(record):
    assert from_record(record) is None


def test_ps_agrees_with_proc(spawn):
    """macOS uses ps; test it wherever there is one."""
    parent = spawn(PARENT)
    child = int(parent.stdout.readline())
    rows = processes._ps_rows()

    assert rows[child].parent == parent.pid
    assert rows[parent.pid].started


def test_ps_start_time_is_independent_of_time_zone(spawn, monkeypatch):
    """`up` and `down` may run in different shells, and a Mac travels."""
    popen = spawn(SLEEPER)
    here = _ps_start(popen.pid)
    monkeypatch.setenv("TZ", "AWAY-9")

    # Linux's ps recomputes a start each time, to the second.
    assert abs(_ps_start(popen.pid) - here) < timedelta(minutes=1)


def _ps_start(pid):
    return datetime.strptime(processes._ps_rows()[pid].started, "%a %b %d %H:%M:%S %Y")  # noqa: DTZ007 - compared among themselves

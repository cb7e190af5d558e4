"""The keeper starts, reports and ends processes, and never outlives its owner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from router.limits import LOG_BYTES_MAX
from router.supervise.keeper import KEEPER, Keeper
from router.supervise.processes import descendants, identify, is_alive, wait_for_exit

ROOT = Path(__file__).resolve().parents[2]
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]
# Prints until SIGTERM, and once more after it.
CHATTERER = """
import signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
while not told:
    print("x" * 10000, flush=True)
    time.sleep(0.001)
print("y" * 200000, flush=True)
sys.exit(7)
"""
TALKER = [sys.executable, "-c", "import sys; print('hello'); print('oops', file=sys.stderr)"]
ORPHANAGE = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print("left", flush=True)
"""
OWNER = """
import sys, time
from pathlib import Path
from router.supervise.keeper import Keeper
folder = Path(sys.argv[1])
keeper = Keeper(folder / "keeper.log")
for name in ("one", "two"):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
    code += "time.sleep(60)'], start_new_session=True); time.sleep(60)"
    keeper.start(name, [sys.executable, "-c", code], {}, folder / "log")
while len(keeper.children) < 2:
    keeper.next_event(1.0)
time.sleep(0.5)
print(keeper.process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def keeper(tmp_path):
    kept = Keeper(tmp_path / "keeper.log")
    yield kept
    kept.close()
    assert (tmp_path / "keeper.log").read_text() == ""


def until(keeper: Keeper, kind: str) -> dict:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        event = keeper.next_event(0.5)
        if event and event["event"] == kind:
            return event
    pytest.fail(f"no event {kind}")


def test_keeper_starts_and_ends_a_process(keeper, tmp_path):
    keeper.start("sleeper", SLEEPER, {}, tmp_path / "log")
    started = until(keeper, "started")
    process = keeper.children["sleeper"]

    assert started["name"] == "sleeper"
    assert is_alive(process)
    assert os.getsid(process.pid) == process.pid

    events = keeper.end(["sleeper"], 2.0)

    assert [event["event"] for event in events] == ["exited", "ended"]
    assert events[0]["status"] == -signal.SIGTERM
    assert not is_alive(process)
    assert keeper.children == {}


def test_keeper_forwards_lines_and_logs_errors(keeper, tmp_path):
    keeper.start("talker", TALKER, {}, tmp_path / "log", piped=True)

    assert until(keeper, "line")["text"] == "hello"
    assert until(keeper, "exited")["status"] == 0
    assert (tmp_path / "log").read_text() == "oops\n"


def test_unpiped_output_goes_to_the_log(keeper, tmp_path):
    keeper.start("talker", TALKER, {}, tmp_path / "log")
    until(keeper, "exited")

    assert sorted((tmp_path / "log").read_text().split()) == ["hello", "oops"]
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_growing_log_is_rotated(keeper, tmp_path):
    """Clients can cause log lines, which must not fill the disk; the last lines are kept."""
    talk = "import time\nfor i in range(50): print(i, 'x' * 1_000_000, flush=True)\n"
    talk += "time.sleep(2.5)\nprint('the end', flush=True)\ntime.sleep(60)"
    log, older = tmp_path / "log", tmp_path / "log.1"
    keeper.start("talker", [sys.executable, "-c", talk], {}, log)
    deadline_s = time.monotonic() + 60
    while not (older.exists() and log.read_text().endswith("the end\n")):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)

    assert log.stat().st_size <= LOG_BYTES_MAX
    assert 0 < older.stat().st_size <= LOG_BYTES_MAX
    assert older.stat().st_mode & 0o077 == 0


def test_failed_start_reports_its_reason(keeper, tmp_path):
    keeper.start("ghost", ["/nowhere/to/be/found"], {}, tmp_path / "log")
    event = until(keeper, "exited")

    assert event["status"] is None
    assert "No such file" in event["why"]


def test_process_that_never_stops_printing_is_ended(keeper, tmp_path):
    for _ in range(3):
        keeper.start(
            "chatterer", [sys.executable, "-c", CHATTERER], {}, tmp_path / "log", piped=True
        )
        until(keeper, "line")
        events = keeper.end(["chatterer"], 5.0)

        assert [e["status"] for e in events if e["event"] == "exited"] == [7]
        assert [len(e["text"]) for e in events if e["event"] == "line"][-1] == 200_000


def test_end_does_not_hang_when_keeper_is_dead(keeper, tmp_path):
    keeper.start("sleeper", SLEEPER, {}, tmp_path / "log")
    until(keeper, "started")
    os.kill(keeper.process.pid, signal.SIGKILL)

    assert keeper.end(["sleeper"], 5.0)[-1]["name"] == KEEPER


def test_keeper_reports_its_own_end(keeper):
    os.kill(keeper.process.pid, signal.SIGTERM)

    assert until(keeper, "exited")["name"] == KEEPER


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux adopts orphans")
def test_orphans_are_adopted_and_ended(keeper, tmp_path):
    keeper.start("orphanage", [sys.executable, "-c", ORPHANAGE], {}, tmp_path / "log", piped=True)
    until(keeper, "exited")
    orphans = descendants([keeper.process.pid])

    assert len(orphans) == 1

    keeper.close()
    assert wait_for_exit(orphans, 5.0) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP])  # the latter by a terminal
def test_no_process_outlives_its_owner(tmp_path, how):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    keeper_pid = int(owner.stdout.readline())
    owned = [identify(keeper_pid), *descendants([keeper_pid])]
    try:
        assert len(owned) == 5

        owner.send_signal(how)

        assert wait_for_exit(owned, 10.0) == []
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_processes_of_killed_keeper_are_ended(tmp_path):
    kept = Keeper(tmp_path / "keeper.log")
    # The grandchild shares its parent's session, as Ray's processes do.
    code = ORPHANAGE.replace(", start_new_session=True", "") + "time.sleep(60)"
    kept.start("parent", [sys.executable, "-c", code], {}, tmp_path / "log", piped=True)
    until(kept, "line")
    owned = descendants([kept.process.pid])
    os.kill(kept.process.pid, signal.SIGKILL)
    kept.close()

    assert len(owned) == 2
    assert wait_for_exit(owned, 5.0) == []

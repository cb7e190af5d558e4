"""Process identities: a pid is ours only while its start time is the one we recorded.

Pids are reused and Ray's processes look alike on every machine, so nothing here ever ends a
process by its name.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_S = 0.05
KILL_WAIT_S = 3.0
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """Identity of a process: its pid and its start time."""

    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class _Row:
    parent: int
    started: str
    cpu_s: float = 0.0


def _linux_row(pid: int) -> _Row | None:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    # The command may hold spaces and brackets: fields are counted from its last bracket.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return None
    ticks = int(fields[11]) + int(fields[12])
    return _Row(int(fields[1]), fields[19], ticks / os.sysconf("SC_CLK_TCK"))


def _ps_rows() -> dict[int, _Row]:
    command = ["/bin/ps", "-axo", "pid=,ppid=,stat=,time=,lstart="]
    # The start time is written alike in every locale and time zone.
    environment = {"LC_ALL": "C", "TZ": "UTC0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    rows = {}
    for line in done.stdout.splitlines():
        pid, parent, state, cpu, started = line.split(None, 4)
        if not state.startswith("Z"):
            rows[int(pid)] = _Row(int(parent), started.strip(), _clock_seconds(cpu))
    return rows


def _clock_seconds(text: str) -> float:
    """Read processor time as `ps` writes it: [[DD-]HH:]MM:SS[.ss]."""
    days, _, clock = text.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86_400 * int(days or 0)


def _rows() -> dict[int, _Row]:
    """List every live process; a zombie is not one."""
    if not sys.platform.startswith("linux"):
        return _ps_rows()
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    return {pid: row for pid in pids if (row := _linux_row(pid)) is not None}


def identify(pid: int) -> ProcessId | None:
    """Return the identity of a live process, or None."""
    row = _linux_row(pid) if sys.platform.startswith("linux") else _ps_rows().get(pid)
    return None if row is None else ProcessId(pid, row.started)


def is_alive(process: ProcessId) -> bool:
    """Return whether this very process still runs."""
    return identify(process.pid) == process


def cpu_seconds(root: int) -> float:
    """Sum the processor time that the live descendants of a process have used."""
    rows = _rows()
    return sum(rows[process.pid].cpu_s for process in _descendants([root], rows))


def descendants(roots: Iterable[int]) -> list[ProcessId]:
    """List the children of `roots`, theirs, and so on; the roots themselves are left out."""
    return _descendants(roots, _rows())


def _descendants(roots: Iterable[int], rows: dict[int, _Row]) -> list[ProcessId]:
    children: dict[int, list[int]] = {}
    for pid, row in rows.items():
        children.setdefault(row.parent, []).append(pid)
    listed: list[ProcessId] = []
    frontier = list(roots)
    while frontier:
        for child in children.pop(frontier.pop(), []):
            listed.append(ProcessId(child, rows[child].started))
            frontier.append(child)
    return listed


def session_members(leaders: Iterable[ProcessId]) -> list[ProcessId]:
    """List the processes in the sessions that `leaders` opened, also where a leader has ended.

    A session's number is not reused while a process is in it. A process that got the number since
    is recognized by its start time.
    """
    rows = _rows()
    wanted = {
        leader.pid
        for leader in leaders
        if leader.pid not in rows or rows[leader.pid].started == leader.started
    }
    members = []
    for pid, row in rows.items():
        with contextlib.suppress(OSError):  # ended since it was listed
            if wanted and os.getsid(pid) in wanted:
                members.append(ProcessId(pid, row.started))
    return members


def send(processes: Iterable[ProcessId], signal_number: int) -> None:
    """Signal those of `processes` that still run."""
    for process in processes:
        if is_alive(process):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal_number)


def wait_for_exit(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Wait for all to end; return those that did not."""
    deadline_s = time.monotonic() + timeout_s
    running = [process for process in processes if is_alive(process)]
    while running and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
        running = [process for process in running if is_alive(process)]
    return running


def end(
    leaders: Iterable[ProcessId],
    grace_s: float,
    wait: Callable[[list[ProcessId], float], object] = wait_for_exit,
) -> list[ProcessId]:
    """Ask `leaders` to end, `wait`, then kill them and all they started; return what survived."""
    targets = list(leaders)
    owned = targets + descendants(process.pid for process in targets if is_alive(process))
    send(targets, signal.SIGTERM)
    wait(targets, grace_s)
    # What a leader leaves behind gets no grace period: its leader had the time to end it.
    survivors = [*owned, *session_members(targets)]
    send(survivors, signal.SIGKILL)
    return wait_for_exit(survivors, KILL_WAIT_S)


def to_record(process: ProcessId) -> dict[str, Any]:
    """Turn a process into what a pid file holds."""
    return {"pid": process.pid, "started": process.started}


def from_record(record: object) -> ProcessId | None:
    """Read a record that `to_record` wrote; return None for anything else."""
    if not isinstance(record, dict):
        return None
    pid, started = record.get("pid"), record.get("started")
    if isinstance(pid, int) and pid > 1 and isinstance(started, str):
        return ProcessId(pid, started)
    return None

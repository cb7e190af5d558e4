"""Keeper process: parent of every process that a command starts, so that none outlives the command.

    macfabric up ──commands, one JSON line each──► keeper ──► ray start (several), node, router
                 ◄──started, line, exited, ended──

When the command exits, for whatever reason, its end of the pipe closes, and the keeper ends
everything that it started. On Linux the keeper also adopts orphans (a Ray worker whose raylet was
killed), and its children die with it if it is killed itself.

Children append to bounded logs: the newest part of a log that is too long is copied to `NAME.1`,
and the log is truncated, because the writer keeps its descriptor open. Lines written between copy
and truncation are lost.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from router.limits import CHILD_LINE_BYTES_MAX, LOG_BYTES_MAX
from router.supervise.processes import (
    KILL_WAIT_S,
    POLL_S,
    ProcessId,
    descendants,
    end,
    identify,
    is_alive,
    send,
    session_members,
    to_record,
    wait_for_exit,
)


def open_log(path: Path) -> int:
    """Open a log for appending, readable by its owner alone; return the descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def rotate_log(path: Path, bytes_max: int = LOG_BYTES_MAX) -> bool:
    """Rotate a log that is longer than `bytes_max`; return whether it was."""
    try:
        size = path.stat().st_size
        if size <= bytes_max:
            return False
        older = path.with_name(f"{path.name}.1")
        older.unlink(missing_ok=True)
        with path.open("rb") as source, os.fdopen(open_log(older), "wb") as target:
            source.seek(size - bytes_max)
            shutil.copyfileobj(source, target)
    except OSError:
        pass  # a full disk: the old lines are lost then
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
    return True


KEEPER = "keeper"
LAST_GRACE_S = 8.0
LOGS_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


def _die_with_parent() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _adopt_orphans() -> None:
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class _Lines:
    """Reader of whole lines from a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pending = b""

    def read(self) -> tuple[list[bytes], bool]:
        """Return the whole lines that have arrived, and whether more may follow."""
        chunk = os.read(self.descriptor, 65536)
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        if len(self._pending) > CHILD_LINE_BYTES_MAX:
            self._pending = b""
        return lines, bool(chunk)


class _Child:
    """One process started on request, with the pipe of its output if it has one."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.name: str = order["name"]
        # Ray's start is detected in its whole log, which is short.
        self.log = Path(order["log"]) if order["bounded"] else None
        output = open_log(Path(order["log"]))
        try:
            self.popen = subprocess.Popen(
                order["argv"],
                env=order["env"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if order["piped"] else output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the keeper has one thread
            )
        finally:
            os.close(output)
        self.process = identify(self.popen.pid) or ProcessId(self.popen.pid, "gone")
        self.lines = _Lines(self.popen.stdout.fileno()) if self.popen.stdout else None


class _Keeper:
    def __init__(self) -> None:
        self._orders = _Lines(sys.stdin.fileno())
        self._children: dict[int, _Child] = {}
        self._ended = False
        self._looked_s = time.monotonic()

    def run(self) -> None:
        """Serve until the command closes its end, then end everything."""
        _adopt_orphans()
        signal.signal(signal.SIGINT, lambda *_: None)  # SIG_IGN would be inherited
        signal.signal(signal.SIGTERM, self._on_term)
        while not self._ended:
            if self._forward_ready(POLL_S, self._orders.descriptor):
                self._take_orders()
            self._reap()
            self._rotate_logs()
        self._end_all()

    def _rotate_logs(self) -> None:
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOGS_EVERY_S:
            self._looked_s = now_s
            for child in self._children.values():
                if child.log is not None:
                    rotate_log(child.log, LOG_BYTES_MAX)

    def _on_term(self, _signal_number: int, _frame: object) -> None:
        self._ended = True

    def _send_event(self, **event: object) -> None:
        with contextlib.suppress(OSError):  # the command has ended: the loop will notice
            os.write(sys.stdout.fileno(), json.dumps(event).encode() + b"\n")

    def _take_orders(self) -> None:
        lines, more = self._orders.read()
        self._ended = self._ended or not more
        for line in lines:
            order = json.loads(line)
            if order["order"] == "start":
                self._start(order)
            else:
                self._end(set(order["names"]), float(order["grace_s"]))

    def _start(self, order: dict[str, Any]) -> None:
        try:
            child = _Child(order)
        except OSError as error:
            self._send_event(event="exited", name=order["name"], status=None, why=str(error))
            return
        self._children[child.popen.pid] = child
        self._send_event(event="started", name=child.name, **to_record(child.process))

    def _end(self, names: set[str], grace_s: float) -> None:
        chosen = [child for child in self._children.values() if child.name in names]
        survivors = end([child.process for child in chosen], grace_s, self._drain_pipes)
        # A process that looks like a zombie cannot be reaped until its last thread has ended.
        deadline_s = time.monotonic() + KILL_WAIT_S
        while not survivors and time.monotonic() < deadline_s:
            self._reap()
            if not any(child.popen.pid in self._children for child in chosen):
                break
            time.sleep(POLL_S)
        self._send_event(event="ended", name="", names=sorted(names), survivors=len(survivors))

    def _drain_pipes(self, processes: list[ProcessId], timeout_s: float) -> None:
        """Drain pipes while processes end; a process whose pipe is full could not end."""
        deadline_s = time.monotonic() + timeout_s
        while any(map(is_alive, processes)) and time.monotonic() < deadline_s:
            self._forward_ready(POLL_S)

    def _forward_ready(self, timeout_s: float, *others: int) -> bool:
        """Forward what children printed; return whether any of `others` can be read."""
        pipes = {c.lines.descriptor: c for c in self._children.values() if c.lines}
        ready = select.select([*others, *pipes], [], [], timeout_s)[0]
        for descriptor in ready:
            if descriptor in pipes:
                self._forward(pipes[descriptor])
        return any(descriptor in others for descriptor in ready)

    def _forward(self, child: _Child) -> None:
        assert child.lines is not None
        lines, more = child.lines.read()
        for line in lines:
            self._send_event(event="line", name=child.name, text=line.decode("utf-8", "replace"))
        if not more:
            child.lines = None

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                child = self._children.pop(pid, None)
                if child is not None:  # else an adopted orphan
                    self._report_exit(child, os.waitstatus_to_exitcode(status))

    def _report_exit(self, child: _Child, status: int) -> None:
        while child.lines and select.select([child.lines.descriptor], [], [], 0)[0]:
            self._forward(child)
        child.lines = None  # output of ended processes is dropped
        child.popen.returncode = status
        if child.popen.stdout:
            child.popen.stdout.close()
        self._send_event(event="exited", name=child.name, status=status, why="")

    def _end_all(self) -> None:
        known = descendants([os.getpid()])
        end([c.process for c in self._children.values()], LAST_GRACE_S, self._drain_pipes)
        self._reap()
        # Orphans adopted since, and on macOS those listed before they became orphans.
        for _ in range(3):
            survivors = [*known, *descendants([os.getpid()])]
            send(survivors, signal.SIGKILL)
            if not wait_for_exit(survivors, KILL_WAIT_S):
                break
            self._reap()


class Keeper:
    """Client of the keeper process, which it starts."""

    def __init__(self, log: Path) -> None:
        root = Path(__file__).resolve().parents[2]
        rotate_log(log)
        with os.fdopen(open_log(log), "ab") as output:
            self._popen: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "router.supervise.keeper"],
                cwd=root,
                env=os.environ | {"PYTHONPATH": str(root)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._orders: IO[bytes] = self._popen.stdin
        self._events = _Lines(self._popen.stdout.fileno())
        self._waiting: list[dict[str, Any]] = []
        self.process = identify(self._popen.pid) or ProcessId(self._popen.pid, "gone")
        self.children: dict[str, ProcessId] = {}  # what runs, by name
        self._started: list[ProcessId] = []

    def start(
        self,
        name: str,
        argv: list[str],
        env: dict[str, str],
        log: Path,
        *,
        piped: bool = False,
        bounded: bool = True,
    ) -> None:
        """Start a process in a session of its own; `piped` turns its output into `line` events.

        A `bounded` log is rotated before it grows too large.
        """
        order = {"name": name, "argv": argv, "env": env, "log": str(log)}
        self._order(order="start", **order, piped=piped, bounded=bounded)

    def end(self, names: list[str], grace_s: float) -> list[dict[str, Any]]:
        """Ask processes to end, then kill those left; return the events that arrived meanwhile."""
        self._order(order="end", names=names, grace_s=grace_s)
        passed: list[dict[str, Any]] = []
        while (event := self.next_event(grace_s + 2 * KILL_WAIT_S)) is not None:
            passed.append(event)
            is_done = event["event"] == "ended" and event["names"] == sorted(names)
            if is_done or event["name"] == KEEPER:
                break
            if event["event"] == "exited" and event["name"] == KEEPER:
                break  # it sends nothing more, and `close` ends what it left
        return passed

    def next_event(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next event, or None after `timeout_s`; the keeper's own end is one, too."""
        deadline_s = time.monotonic() + timeout_s
        while not self._waiting:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._events.descriptor], [], [], left_s)[0]:
                return None
            lines, more = self._events.read()
            self._waiting.extend(json.loads(line) for line in lines)
            if not more:
                return {"event": "exited", "name": KEEPER, "status": None, "why": ""}
        event = self._waiting.pop(0)
        if event["event"] == "started":
            process = ProcessId(event["pid"], event["started"])
            self.children[event["name"]] = process
            self._started.append(process)
        elif event["event"] == "exited":
            self.children.pop(event["name"], None)
        return event

    def close(self) -> None:
        """End everything still running, and the keeper itself."""
        with contextlib.suppress(OSError):
            self._orders.close()
        try:
            self._popen.wait(LAST_GRACE_S + 5 * KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if self._popen.stdout:
            self._popen.stdout.close()
        # Only a keeper that was killed leaves processes behind.
        survivors = session_members(self._started)
        send(survivors, signal.SIGKILL)
        wait_for_exit(survivors, KILL_WAIT_S)

    def _order(self, **order: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # reported by next_event
            self._orders.write(json.dumps(order).encode() + b"\n")
            self._orders.flush()


if __name__ == "__main__":
    _Keeper().run()

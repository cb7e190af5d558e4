"""How the previous process of a node ended.

A mark in the node's folder records that a process runs, and since when; a process that stops on
request records that, too. Any other mark found at a start means a crash that left a trace, a kill
by the system for lack of memory, or an end without a trace.
"""

import json
import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from fabric.codec import from_plain, parse_json
from fabric.control.usage_view import CRASHED, KILLED, OUT_OF_MEMORY, STOPPED, ExitView
from fabric.errors import FabricError
from fabric.hosting.log_files import catch_crashes, last_lines
from fabric.ports import Clock
from node.limits import RUN_MARK_BYTES_MAX
from node.machine import out_of_memory_kills
from node.store.posix_disk import PosixDisk

MARK: Final = "running"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunMark:
    """Record of one run of a node's process."""

    began_s: float  # wall clock
    seen_s: float  # wall clock; when it was last known to run
    kills: int | None = None  # processes killed in its container before its start
    cause: str | None = None  # why it ended; None: it runs
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PreviousLog:
    """End of the previous run's log."""

    lines: tuple[str, ...] = ()  # last lines
    crash: str = ""  # the first line of a fatal signal's trace


NO_LOG: Final = PreviousLog()


def take_log(log: Path) -> PreviousLog:
    """Return the end of the previous run's log; from now on, fatal signals leave traces there.

    A trace has the stacks of all threads, without values.
    """
    return PreviousLog(last_lines(log), catch_crashes(log))


class ExitWatch:
    """Writer of this process's mark, and reader of the previous one."""

    def __init__(
        self,
        folder: Path,
        clock: Clock,
        kills: Callable[[], int | None] = out_of_memory_kills,
    ) -> None:
        """Keep the mark in `folder`."""
        self._folder = folder
        self._clock = clock
        self._kills = kills
        self._mark: RunMark | None = None

    def begin(self, log: PreviousLog = NO_LOG) -> ExitView | None:
        """Return how the previous run ended, whose log is given; mark this one."""
        before, now_s, kills = self._read(), self._clock.wall_s(), self._kills()
        ended = None if before is None else self._view_of(before, kills, log)
        self._mark = RunMark(now_s, now_s, kills)
        self._write(self._mark)
        return ended

    def note_alive(self) -> None:
        """Note that the process still runs."""
        if self._mark is not None and self._mark.cause is None:
            self._mark = RunMark(self._mark.began_s, self._clock.wall_s(), self._mark.kills)
            self._write(self._mark)

    def note_end(self, cause: str = STOPPED, detail: str = "stopped on request") -> None:
        """Note why the process is about to end."""
        if self._mark is not None:
            began_s, kills = self._mark.began_s, self._mark.kills
            self._mark = RunMark(began_s, self._clock.wall_s(), kills, cause, detail)
            self._write(self._mark)

    def _view_of(self, mark: RunMark, kills: int | None, log: PreviousLog) -> ExitView:
        if mark.cause is not None:
            cause, detail = mark.cause, mark.detail
        elif log.crash:
            cause, detail = CRASHED, log.crash
        elif kills is not None and mark.kills is not None and kills > mark.kills:
            cause, detail = OUT_OF_MEMORY, "the system killed it for lack of memory"
        else:
            cause, detail = KILLED, "ended without a trace: killed by a signal, or with its machine"
        return ExitView.of(mark.seen_s, cause, detail, () if cause == STOPPED else log.lines)

    def _read(self) -> RunMark | None:
        try:
            with closing(PosixDisk(self._folder)) as disk:
                raw = disk.read(MARK, RUN_MARK_BYTES_MAX)
            mark: RunMark = from_plain(RunMark, parse_json(raw), "mark")
        except (FabricError, OSError):
            return None
        return mark

    def _write(self, mark: RunMark) -> None:
        raw = json.dumps(asdict(mark)).encode()
        try:
            with closing(PosixDisk(self._folder, must_exist=True)) as disk:
                disk.publish(MARK, [raw])
        except (FabricError, OSError) as error:  # its next start then reports less
            _log.debug("cannot write the mark of this run: %s", error)

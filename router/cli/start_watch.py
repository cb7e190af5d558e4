"""Time limit of a start: as long as it makes progress, up to a fixed bound.

Progress is an event of a started process, a log that grows, or processor time used: a busy
machine is slow in all of these, a start that hangs shows none.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from router.supervise.processes import cpu_seconds

STALL_S = 180.0  # without progress, after which a start has failed
START_LIMIT_S = 1_800.0  # of one start, even while it makes progress
LOOK_S = 2.0
# Idle processes of a fabric use less than a tenth of a core; a start on a busy machine uses more.
CPU_PROGRESS_S = 20.0


@dataclass(slots=True)
class StartWatch:
    """Progress of one start."""

    logs: Path
    root_pid: int
    limit_s: float = START_LIMIT_S
    stall_s: float = STALL_S
    now_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[int], float] = cpu_seconds
    _began_s: float = field(init=False)
    _progress_s: float = field(init=False)
    _looked_s: float = 0.0
    _log_bytes: int = 0
    _cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._began_s = self._progress_s = self.now_s()

    def note(self) -> None:
        """Count an event of a process as progress."""
        self._progress_s = self.now_s()

    def expired(self) -> str | None:
        """Return why the start has failed, or None while it may continue."""
        now_s = self.now_s()
        if now_s - self._began_s > self.limit_s:
            return f"was not ready within {self.limit_s:g} s"
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look()
        if self.now_s() - self._progress_s > self.stall_s:
            return f"was not ready in time: no progress for {self.stall_s:g} s"
        return None

    def _look(self) -> None:
        log_bytes, cpu_s = _total_bytes(self.logs), self.cpu_s(self.root_pid)
        if log_bytes != self._log_bytes or cpu_s - self._cpu_s > CPU_PROGRESS_S:
            self._log_bytes, self._cpu_s = log_bytes, cpu_s
            self.note()


def _total_bytes(folder: Path) -> int:
    sizes = 0
    for path in folder.glob("*.log"):
        try:
            sizes += path.stat().st_size
        except OSError:  # removed since the listing
            continue
    return sizes

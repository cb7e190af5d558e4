"""Requests to macOS: stay awake while the node works, and keep its folder out of backups.

A Mac with the default energy settings sleeps minutes after its last key press, also in the middle
of an answer. The display may go dark: a lit one gives the GPU's watchdog more to interrupt.
Source: caffeinate(8); ml-explore/mlx#3267 for the display.

Keep Time Machine from backing up a node's folder.

Its backups would keep what is erased here, and copy each day's blocks. Source: tmutil(8); without
`-p` an exclusion belongs to the folder itself and needs no rights.
"""

import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.background_loop import BackgroundLoop

CAFFEINATE: Final = "/usr/bin/caffeinate"
POLL_S: Final = 2.0
IDLE_S: Final = 60.0  # an agent program is soon back with the result of a tool
RETRY_S: Final = 60.0  # if the program is missing or ends by itself

_log = logging.getLogger(__name__)


def caffeinate_command(pid: int) -> list[str]:
    """Return the command that prevents idle, system and disk sleep until process `pid` ends."""
    return [CAFFEINATE, "-i", "-s", "-m", "-w", str(pid)]


class PowerAssertion:
    """Prevention of sleep while a node works, on macOS only; used on the node's event loop."""

    def __init__(
        self,
        is_busy: Callable[[], bool],
        monotonic_s: Callable[[], float],
        note_failed_round: Callable[[], None],
        platform: str = sys.platform,
    ) -> None:
        self._is_busy = is_busy
        self._monotonic_s = monotonic_s
        self._is_mac = platform == "darwin"
        self._process: subprocess.Popen[bytes] | None = None
        self._busy_s = -math.inf  # time of the last work
        self._tried_s = -math.inf  # time of the program's last start
        self._loop = BackgroundLoop("keeping this Mac awake", self._step, note_failed_round)

    @property
    def is_held(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start checking every POLL_S seconds whether the node has work."""
        if self._is_mac:
            self._loop.start()

    async def stop(self) -> None:
        """Let the Mac sleep again."""
        await self._loop.stop()
        self._release()

    async def _step(self) -> float:
        now_s = self._monotonic_s()
        if self._is_busy():
            self._busy_s = now_s
            if not self.is_held and now_s - self._tried_s >= RETRY_S:
                self._tried_s = now_s
                self._hold()
        elif self.is_held and now_s - self._busy_s >= IDLE_S:
            self._release()
        return POLL_S

    def _hold(self) -> None:
        try:
            self._process = subprocess.Popen(
                caffeinate_command(os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            _log.warning("this Mac may sleep while it answers: %s: %s", CAFFEINATE, error.strerror)

    def _release(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
            self._tried_s = -math.inf


TMUTIL: Final = "/usr/bin/tmutil"
TIMEOUT_S: Final = 30.0


def exclude_from_backups(folder: Path, platform: str = sys.platform) -> None:
    """Exclude a folder on macOS; log a failure."""
    if platform != "darwin":
        return
    try:
        done = subprocess.run(
            [TMUTIL, "addexclusion", str(folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("Time Machine may back up erased agents: %s", type(error).__name__)
        return
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
        _log.warning("Time Machine may back up erased agents: %s", reason[0])

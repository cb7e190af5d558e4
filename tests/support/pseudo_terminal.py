"""A program in its own terminal, which a test types into and reads."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LONGEST_S = 50.0  # less than the time for which a fake fabric withholds its answer
# Makes this the controlling terminal of the program's session, so that keys send signals.
_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][A-Z0-9]?|\r|\x07")


class TerminalProgram:
    """A running program with an emulated keyboard and screen."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        size: tuple[int, int] = (80, 24),
    ) -> None:
        """Start the program; `size` is the screen's columns and rows."""
        columns, rows = size
        self.raw = ""  # everything shown since the last key
        self._terminal, self._programs_end = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.mode_before = termios.tcgetattr(self._programs_end)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, *argv], env=environment, cwd=folder,
            start_new_session=True,
            stdin=self._programs_end, stdout=self._programs_end, stderr=self._programs_end,
        )  # fmt: skip

    @property
    def shown(self) -> str:
        """Text shown since the last key, without control sequences."""
        return _CONTROLS.sub("", self.raw)

    @property
    def mode(self) -> list:
        """The terminal's present mode."""
        return termios.tcgetattr(self._programs_end)

    def type(self, keys: str) -> None:
        self.raw = ""
        os.write(self._terminal, keys.encode())

    def sees(self, wanted: Iterable[str]) -> bool:
        """Read until all wanted texts were shown; return whether they were."""
        texts, deadline_s = list(wanted), time.monotonic() + LONGEST_S
        while time.monotonic() < deadline_s:
            if all(text in self.shown for text in texts):
                return True
            self._read(0.1)
        return False

    def wait(self) -> int:
        """Read until the program ends; return its exit status."""
        deadline_s = time.monotonic() + LONGEST_S
        while self.process.poll() is None and time.monotonic() < deadline_s:
            self._read(0.1)
        while self._read(0.0):
            pass
        return self.process.wait(timeout=1)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._programs_end)
        os.close(self._terminal)

    def _read(self, wait_s: float) -> bool:
        if not select.select([self._terminal], [], [], wait_s)[0]:
            return False
        self.raw += os.read(self._terminal, 1 << 16).decode(errors="replace")
        return True

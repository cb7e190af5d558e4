"""Memory and writes of a server with all its processes."""

import threading
from pathlib import Path

import psutil

PERIOD_S = 0.2


class ProcessUsage:
    """Peak memory of a process and its children while it is watched."""

    def __init__(self, pid: int) -> None:
        """Start to watch, until `stop`."""
        self._root = psutil.Process(pid)
        self._is_over = threading.Event()
        self.peak_bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(PERIOD_S):
            self.peak_bytes = max(self.peak_bytes, self._own_bytes())

    def _own_bytes(self) -> int:
        """Return the private memory of the processes."""
        total = 0
        for process in self._tree():
            try:
                total += process.memory_full_info().uss
            except psutil.Error:  # the process has ended, or is another user's
                continue
        return total

    def _tree(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.Error:
            return []

    def written_bytes(self, folder: Path) -> int:
        """Return the bytes that the processes have written to disk, or else the size of `folder`.

        macOS does not count writes of processes.
        """
        if not hasattr(psutil.Process, "io_counters"):
            return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        total = 0
        for process in self._tree():
            try:
                total += process.io_counters().write_bytes
            except psutil.Error:
                continue
        return total

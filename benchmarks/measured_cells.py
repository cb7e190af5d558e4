"""Measured cells of a long benchmark, kept on disk: an interrupted run continues.

A file holds one JSON line with the run's parameters, then one for each measured cell.
"""

import argparse
import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import say

Figures = dict[str, list[float]]  # samples by name


def add_keep_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--keep`, the file of a benchmark's cells."""
    parser.add_argument("--keep", type=Path, help="file of measured cells, to continue later")


class MeasuredCells:
    """Cells by name; with a file, each is stored before the next one is measured."""

    def __init__(self, path: Path | None, depends_on: Mapping[str, Any]) -> None:
        """Read the cells of an earlier run with equal parameters; discard those of other runs."""
        self._path = path
        self._cells: dict[str, Figures] = {}
        self.is_interrupted = False
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        head = json.dumps(depends_on, sort_keys=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        if lines and lines[0] == head:
            self._cells = dict(_whole_lines(lines[1:]))
            say(f"{len(self._cells)} cells are kept from an interrupted run")
            self._rewrite(head)
        else:
            if lines:
                say("what an earlier run measured was of other parameters, and is dropped")
            self._rewrite(head)

    def __contains__(self, name: str) -> bool:
        return name in self._cells

    def get(self, name: str) -> Figures | None:
        """Return a cell's samples; None if it was not measured."""
        return self._cells.get(name)

    def add(self, name: str, figures: Figures) -> None:
        """Store a cell."""
        self._cells[name] = figures
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, figures]) + "\n")
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def until_interrupted(self) -> Iterator[None]:
        """Measure until the end, Control-C or SIGTERM; report the measured cells either way."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            yield
        except KeyboardInterrupt:
            self.is_interrupted = True
            say("interrupted: the report shows what was measured")
        finally:
            signal.signal(signal.SIGTERM, before)

    def finish(self) -> None:
        """Remove the file of a complete run."""
        if self._path is not None and not self.is_interrupted:
            self._path.unlink(missing_ok=True)

    def _rewrite(self, head: str) -> None:
        assert self._path is not None, "there is no file"
        lines = [head, *(json.dumps([name, cell]) for name, cell in self._cells.items())]
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _whole_lines(lines: list[str]) -> Iterator[tuple[str, Figures]]:
    for line in lines:
        try:
            name, figures = json.loads(line)
        except ValueError:  # the last line of a killed run
            return
        yield name, figures

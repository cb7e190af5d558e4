"""`macfabric logs`: what the router and the nodes on this machine have logged, in order of time."""

import argparse
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from fabric.hosting.limits import LOG_FILES_MAX
from fabric.hosting.log_files import ENDING, row_of
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.errors import CommandError
from router.cli.terminal import print_json, print_line

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
POLL_S: Final = 0.3
USUAL_LINES: Final = 100
_TEXT_ENDING: Final = ".txt"

Row = dict[str, Any]


def add_logs(commands: Any) -> None:
    """Declare the command."""
    logs = commands.add_parser(
        "logs",
        description="Print the last lines that the router and the nodes on this machine have "
        "logged, in order of time. A turn's id (the answer's x-request-id) finds all lines about "
        "it. With --json, the lines as they are in the files (see docs/cli.md, Logs).",
    )
    logs.add_argument("-f", "--follow", action="store_true", help="continue until Ctrl-C")
    logs.add_argument(
        "--node", action="append", metavar="NODE", help="only this node, or `router`; repeatable"
    )
    logs.add_argument("--turn", metavar="TURN", help="only lines about this turn")
    logs.add_argument(
        "--level", choices=LEVELS, default="debug", help="only this level and higher ones"
    )
    logs.add_argument(
        "--lines", type=int, metavar="N", default=USUAL_LINES, help="the last N (default: 100)"
    )
    logs.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    logs.add_argument("--json", action="store_true", help="print JSON lines")
    logs.set_defaults(run=run_logs)


@dataclass(frozen=True, slots=True)
class LineFilter:
    """Filter of log lines."""

    processes: frozenset[str]  # empty: of all
    turn: str | None
    level: int

    def matches(self, row: Row) -> bool:
        """Return whether the filter accepts a line."""
        level = row.get("level")
        rank = LEVELS.index(level) if level in LEVELS else len(LEVELS)
        return (
            rank >= self.level
            and (not self.processes or row.get("process") in self.processes)
            and (self.turn is None or row.get("turn") == self.turn)
        )


def run_logs(arguments: argparse.Namespace) -> int:
    """Print lines, and with --follow continue until Ctrl-C."""
    folder = DataFolder((arguments.data or default_data_dir()).expanduser()).logs
    line_filter = LineFilter(
        frozenset(arguments.node or ()), arguments.turn, LEVELS.index(arguments.level)
    )
    show = _print_row if arguments.json else _print_text
    tails = {path: LogTail(path) for path in _files(folder)}
    if not tails and not arguments.follow:
        raise CommandError(_explain_no_lines(folder))
    kept = [
        deque(filter(line_filter.matches, tail.all_rows()), max(0, arguments.lines))
        for tail in tails.values()
    ]
    for row in deque(_in_order(kept), max(0, arguments.lines)):
        show(row)
    try:
        while arguments.follow:
            _show_new(folder, tails, line_filter, show)
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        pass
    return 0


def _show_new(
    folder: Path, tails: dict[Path, "LogTail"], line_filter: LineFilter, show: Callable[[Row], None]
) -> None:
    """Show what was written since the last look, also to files that are new."""
    for path in _files(folder):
        tails.setdefault(path, LogTail(path))
    new = [list(filter(line_filter.matches, tail.new_rows())) for tail in tails.values()]
    for row in _in_order(new):
        show(row)


def _in_order(lists: Iterable[Iterable[Row]]) -> Iterator[Row]:
    return heapq.merge(*lists, key=_at_s)


def _at_s(row: Row) -> float:
    at_s = row.get("at_s")
    return float(at_s) if isinstance(at_s, int | float) else 0.0


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{ENDING}"))


def _explain_no_lines(folder: Path) -> str:
    if texts := sorted(folder.glob(f"*{_TEXT_ENDING}")):
        listed = ", ".join(map(str, texts))
        return f"log_format is text, so there are no JSON lines: read {listed}"
    return f"Nothing was logged in {folder}: start a fabric with `macfabric up`."


class LogTail:
    """Reader of one log and of the older files that were rotated away from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: tuple[int, int] | None = None  # inode, and the bytes that were read
        self._pending = b""

    def all_rows(self) -> Iterator[Row]:
        """Yield all lines, the oldest first; later ones are new."""
        for number in reversed(range(1, LOG_FILES_MAX)):
            older = self._path.with_name(f"{self._path.name}.{number}")
            yield from _rows(_read(older, 0)[1].split(b"\n"))
        yield from self.new_rows()

    def new_rows(self) -> Iterator[Row]:
        """Yield the lines that were written since the last call."""
        before, offset = self._place or (0, 0)
        inode, raw = _read(self._path, offset)
        if not inode:
            return
        if self._place is not None and inode != before:  # rotated
            older, rest = _read(self._path.with_name(f"{self._path.name}.1"), offset)
            if older == before:
                yield from self._whole(rest)
            self._pending, offset = b"", 0
            inode, raw = _read(self._path, 0)
        self._place = (inode, offset + len(raw))
        yield from self._whole(raw)

    def _whole(self, raw: bytes) -> Iterator[Row]:
        *lines, self._pending = (self._pending + raw).split(b"\n")
        return _rows(lines)


def _read(path: Path, offset: int) -> tuple[int, bytes]:
    """Return a file's inode and its bytes from an offset on; 0 and nothing if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return os.fstat(file.fileno()).st_ino, file.read()
    except OSError:
        return 0, b""


def _rows(lines: Iterable[bytes]) -> Iterator[Row]:
    return (row for line in lines if (row := row_of(line)) is not None)


def _print_row(row: Row) -> None:
    print_json(row, indent=None, flush=True)


def _print_text(row: Row) -> None:
    at = datetime.fromtimestamp(_at_s(row), UTC).astimezone()
    time_text = f"{at:%Y-%m-%d %H:%M:%S}.{at.microsecond // 1000:03d}"
    turn = f" [{row['turn']}]" if row.get("turn") else ""
    frames = row.get("frames")
    place = f" at {frames[-1]}" if isinstance(frames, list) and frames else ""
    code = f" {row['code']}" if row.get("code") else ""
    error = f" ({row['error']}{code}{place})" if row.get("error") else ""
    named = f"{row.get('process', '-'):10}  {row.get('level', '-'):8}"
    print_line(f"{time_text}  {named}  {row['message']}{turn}{error}", flush=True)

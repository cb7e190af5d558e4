"""Logs of a process: lines of text on standard error, and of JSON in rotated files.

A line of JSON has `at_s` (seconds since 1970), `level`, `process`, `logger`, `message`, and where
they apply `turn` (the id of the turn that it is about), `error` (the class of an exception) and
`frames` (its places in the code, the innermost last). An exception's text is not written: it may
quote a prompt.
"""

import faulthandler
import json
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from fabric.errors import FabricError
from fabric.hosting.limits import LOG_FILE_BYTES_MAX, LOG_FILES_MAX, LOG_FRAMES_MAX, LOG_TAIL_BYTES
from fabric.hosting.turn_context import current_turn
from fabric.limits import EXIT_LINES_MAX
from fabric.settings import LOG_FORMATS

ENDING: Final = ".jsonl"
TRACE_ENDING: Final = ".crash"
ROUTER_LOG: Final = "router"
LOGS_FOLDER: Final = "logs"  # of a fabric's data
JSON, _TEXT, NONE = LOG_FORMATS
_OWN: Final = ("fabric", "node", "router", "macfabric")  # loggers whose information is kept


class JsonLine(logging.Formatter):
    """Formatter of records as lines of JSON."""

    def __init__(self, process: str) -> None:
        """Name the process in each line."""
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        row: dict[str, Any] = {
            "at_s": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        turn = current_turn()
        if turn is not None:
            row["turn"] = turn
        if record.exc_info and record.exc_info[0] is not None:
            kind, error, trace = record.exc_info
            row["error"] = kind.__name__
            if isinstance(error, FabricError):
                row["code"] = error.code
            row["frames"] = _frames(trace)
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"))


class TextLine(logging.Formatter):
    """Formatter of records as lines of text, with the turn's id; without texts of exceptions."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line."""
        line = f"{self.formatTime(record)} {record.levelname} {record.name}: {record.getMessage()}"
        turn = current_turn()
        line = line if turn is None else f"{line} [{turn}]"
        if record.exc_info and record.exc_info[0] is not None:
            places = " < ".join(reversed(_frames(record.exc_info[2])))
            line = f"{line} ({record.exc_info[0].__name__} at {places})"
        return line


class OwnRecords(logging.Filter):
    """Filter that keeps macfabric's own records, and warnings of all loggers."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is kept."""
        return record.levelno >= logging.WARNING or record.name.partition(".")[0] in _OWN


def _frames(trace: TracebackType | None) -> list[str]:
    """List the places of a traceback, the innermost last."""
    places: list[str] = []
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        places.append(f"{'/'.join(path.parts[-2:])}:{trace.tb_lineno}")
        trace = trace.tb_next
    return places[-LOG_FRAMES_MAX:]


def node_log(name: str) -> str:
    """Return the name of a node's log file; no node's name has a dot."""
    return f"node.{name}"


def add_log_file(stem: Path, process: str, form: str) -> Path | None:
    """Log this process to a rotated file; return its path.

    Return None, without a file, if the format is `none` or the folder cannot be written to.
    """
    if form == NONE:
        return None
    path = stem.parent / f"{stem.name}{ENDING if form == JSON else '.txt'}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handler = _PrivateFile(path, maxBytes=LOG_FILE_BYTES_MAX, backupCount=LOG_FILES_MAX - 1)
    except OSError as error:
        logging.getLogger("macfabric").warning("cannot write %s: %s", path, error.strerror)
        return None
    handler.setFormatter(JsonLine(process) if form == JSON else TextLine())
    handler.addFilter(OwnRecords())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(min(root.level or logging.INFO, logging.INFO))
    return path


class _PrivateFile(RotatingFileHandler):
    """Rotated file that only its owner may read."""

    def _open(self) -> Any:
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8", errors="backslashreplace")


def catch_crashes(log: Path) -> str:
    """Write traces of fatal signals beside a log; return the first line of the previous trace.

    A trace has the places of all threads in the code, and no values.
    """
    path, before = log.with_suffix(TRACE_ENDING), ""
    with suppress(OSError):
        before = path.read_text("utf-8", "replace").partition("\n")[0].strip()
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.enable(descriptor)  # open as long as the process runs
    return before


def read_tail(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the last lines of a file as rows; skip invalid lines."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if size > LOG_TAIL_BYTES else 0 :]
    except OSError:
        return
    rows = (row for line in lines if (row := row_of(line)) is not None)
    yield from list(rows)[-count:]


def last_lines(path: Path) -> tuple[str, ...]:
    """Return the last lines of a file as text."""
    rows = read_tail(path, EXIT_LINES_MAX)
    return tuple(f"{row.get('level', '')}: {row['message']}" for row in rows)


def row_of(line: bytes) -> dict[str, Any] | None:
    """Parse a line; return None if it is incomplete."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "message" in row else None

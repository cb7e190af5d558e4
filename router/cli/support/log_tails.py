"""The last bytes of log files, without lines whose form is unknown.

Router and nodes write JSON lines without any text of prompts. What else processes print (Ray, a
traceback) may quote anything: of that, only lines of known forms are kept, and only
the classes and places of exceptions.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fabric.hosting.log_files import ENDING, TRACE_ENDING, row_of

# As Python's logging and Ray's command line write it.
_TIMED: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d+\s+[A-Z]+\s")
_RAY: Final = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+ [EWIFD] \d+ \d+\] ")
_PLACE: Final = re.compile(r'\s*File "[^"]*", line \d+(?:, in .*| in .*)?')
_TRACEBACK: Final = "Traceback (most recent call last):"
_RAISED: Final = re.compile(r"(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit))(?::.*)?")
_CRASH: Final = re.compile(r"(?:Fatal Python error: .*|(?:Current thread|Thread) .*|\s*<no .*>)")
# Fields of a JSON line, as fabric/hosting/log_files.py writes them.
_FIELDS: Final = frozenset(
    {"at_s", "level", "process", "logger", "message", "turn", "error", "code", "frames"}
)


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of a log: its lines, and what was left out."""

    text: str
    bytes_before: int  # of the file, before the part that was read
    lines_left_out: int


def read_log_tail(path: Path, bytes_max: int) -> LogEnd:
    """Read the last bytes of a log, from the first whole line on; raise OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        begin = max(0, size - bytes_max)
        file.seek(begin)
        raw = file.read(bytes_max)
    if begin:
        raw = raw.partition(b"\n")[2]
    lines = raw.decode("utf-8", "replace").splitlines()
    is_json = ENDING in path.name
    shown = [_json_line(line) if is_json else _text_line(line) for line in lines]
    kept = [line for line in shown if line is not None]
    text = "".join(f"{line}\n" for line in kept)
    return LogEnd(text, size - len(raw), len(lines) - len(kept))


def is_log(path: Path) -> bool:
    """Return whether a file's name is that of a log, also of a rotated one."""
    stem = re.sub(r"\.\d+$", "", path.name)
    return stem.endswith((ENDING, ".log", ".txt", TRACE_ENDING))


def _json_line(line: str) -> str | None:
    row = row_of(line.encode())
    if row is None:
        return None
    kept_fields = {name: value for name, value in row.items() if name in _FIELDS}
    return json.dumps(kept_fields, ensure_ascii=False, separators=(",", ":"))


def _text_line(line: str) -> str | None:
    if _TIMED.match(line) or _RAY.match(line) or _CRASH.fullmatch(line) or line == _TRACEBACK:
        return line
    if _PLACE.fullmatch(line):
        return line
    raised = _RAISED.fullmatch(line)
    return raised["name"] if raised else None

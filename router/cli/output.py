"""Output of commands: tables and pairs for people, JSON for programs."""

import math
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from fabric.shown_text import escape_line
from fabric.units import format_bytes
from router.cli.terminal import (
    output_is_terminal,
    print_error,
    print_json,
    print_line,
    terminal_columns,
)

_MINUTE_S, _HOUR_MIN, _DAY_H = 60, 60, 48
_MOMENTS = frozenset({"at_s", "created_s", "used_s"})  # wall-clock times
_IDENTIFIERS = frozenset({"epoch", "pid", "port", "revision"})  # compared, not counted
_GAP = "  "


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns. A terminal also gets the title, and only the columns that fit.

    No cell is truncated: ids are meant to be copied.
    """
    available = terminal_columns() if output_is_terminal() else None
    if available is not None:
        print_line(f"{title}:")
    lines, left_out = table_lines(columns, rows, available)
    for line in lines:
        print_line(line)
    if left_out:
        print_error(f"(not shown in {available} columns: {', '.join(left_out)}; --json has all)")


def table_lines(
    columns: Sequence[str], rows: Iterable[Sequence[object]], available: int | None
) -> tuple[list[str], list[str]]:
    """Return aligned lines, the names of the columns first, and the names that do not fit."""
    table = [[escape_line(str(cell)) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    shown = len(columns) if available is None else _columns_that_fit(widths, available)
    lines = []
    for row in table:
        cells = zip(row[:shown], widths[:shown], strict=True)
        lines.append(_GAP.join(cell.ljust(width) for cell, width in cells).rstrip())
    return lines, [name for name in columns[shown:] if name]


def _columns_that_fit(widths: Sequence[int], available: int) -> int:
    """Return how many leading columns fit; at least the first two."""
    total = 0
    for count, width in enumerate(widths):
        total += width + (len(_GAP) if count else 0)
        if total > available:
            return max(count, min(2, len(widths)))
    return len(widths)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one per line."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        print_line(f"{name.ljust(width)}{_GAP}{value}")


def print_answer(answer: Any, pairs: Iterable[tuple[str, object]], *, as_json: bool) -> int:
    """Print an answer as JSON for programs, or as `pairs` for people; return exit status 0."""
    if as_json:
        print_json(answer)
    else:
        print_pairs(pairs)
    return 0


def failed_again(why: object, wait_s: object) -> str:
    """Return why a node failed and when it starts again."""
    again = f"; next start in {wait_s:.0f} s" if isinstance(wait_s, int | float) else ""
    return f"failed: {why}{again}"


class Steps:
    """Progress lines of a long command on standard error, with the time since its start."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._since_s = time.monotonic()
        self._quiet = quiet

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since_s

    def say(self, text: str) -> None:
        if not self._quiet:
            print_error(f"[{self.seconds:5.1f} s] {text}")


def human_bytes(count: Any) -> str:
    """Write a number of bytes with a unit."""
    if not isinstance(count, (int, float)):
        return "-"
    return format_bytes(float(count))


def human_seconds(seconds: Any) -> str:
    """Write a duration with a unit."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < _MINUTE_S:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), _MINUTE_S)
    if minutes < _HOUR_MIN:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, _HOUR_MIN)
    return f"{hours} h {minutes} min" if hours < _DAY_H else f"{hours // 24} d {hours % 24} h"


def human_value(name: str, value: Any) -> str:
    """Write a value of an API answer for people; its name gives the unit."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        inner = ((key if name != "bytes" else f"{key}_bytes", key, x) for key, x in value.items())
        return ", ".join(f"{key} {human_value(unit, x)}" for unit, key, x in inner) or "-"
    if isinstance(value, list):
        return ", ".join(human_value(name, item) for item in value) or "-"
    return _human_number(name, value) if isinstance(value, int | float) else str(value)


def _human_number(name: str, value: float) -> str:
    if name in _MOMENTS:
        return f"{datetime.fromtimestamp(value, UTC).astimezone():%Y-%m-%d %H:%M:%S}"
    if name.endswith("bytes") or name.startswith("bytes_"):
        return human_bytes(value) + ("/s" if name.endswith("_per_s") else "")
    if name == "seconds" or (name.endswith(("_s", "_seconds")) and not name.endswith("_per_s")):
        return human_seconds(value)
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value) if name in _IDENTIFIERS else human_count(value)


def human_count(count: Any) -> str:
    """Write a number with separators."""
    return f"{count:,}" if isinstance(count, int) else "-"

"""What commands print: tables and pairs for people, JSON for programs."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from fabric.shown_text import escape_line
from router.cli.terminal import (
    output_is_terminal,
    print_error,
    print_json,
    print_line,
    terminal_columns,
)

_KIB = 1024
_GAP = "  "


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print aligned columns. A terminal also gets the title, and only the columns that fit.

    No cell is ever cut: ids are there to be copied.
    """
    table = [[escape_line(str(cell)) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    shown = len(columns)
    if output_is_terminal():
        print_line(f"{title}:")
        shown = _columns_that_fit(widths, terminal_columns())
    for row in table:
        cells = zip(row[:shown], widths[:shown], strict=True)
        print_line(_GAP.join(cell.ljust(width) for cell, width in cells).rstrip())
    if shown < len(columns):
        left_out = ", ".join(filter(None, columns[shown:]))
        print_error(f"(not shown in {terminal_columns()} columns: {left_out}; --json has all)")


def _columns_that_fit(widths: Sequence[int], available: int) -> int:
    """Count the leading columns that fit; the first two are shown in any case."""
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
    """Print an answer as it is for programs, or as `pairs` for people; return exit status 0."""
    if as_json:
        print_json(answer)
    else:
        print_pairs(pairs)
    return 0


def failed_again(why: object, wait_s: object) -> str:
    """Say why a node is not there, and when it begins again."""
    again = f"; tries to start again in {wait_s:.0f} s" if isinstance(wait_s, int | float) else ""
    return f"failed: {why}{again}"


class Steps:
    """Says on standard error what a long command is doing, with the time since its start."""

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
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < _KIB:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _KIB
    return f"{size:.1f} TiB"


def human_count(count: Any) -> str:
    """Write a number with separators."""
    return f"{count:,}" if isinstance(count, int) else "-"

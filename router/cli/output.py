"""What commands print: tables for people, plain columns for pipes, JSON for programs."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

_KIB = 1024


def print_json(value: object) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table: with lines on a terminal, in aligned columns otherwise."""
    cells = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table(*map(escape, columns), title=escape(title))
        for row in cells:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    table_rows = [list(columns), *cells]
    widths = [max(len(row[i]) for row in table_rows) for i in range(len(columns))]
    for row in table_rows:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values, one per line."""
    listed = list(pairs)
    width = max((len(name) for name, _ in listed), default=0)
    for name, value in listed:
        print(f"{name.ljust(width)}  {value}")


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
            print(f"[{self.seconds:5.1f} s] {text}", file=sys.stderr, flush=True)


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

"""Standard output and standard error, which only this module writes to.

Everything shown may come from models, files, clients or other machines, so control characters are
escaped here (`fabric/shown_text.py`), and characters that the terminal's encoding lacks as well.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any, Self, TextIO

from fabric.shown_text import escape_block, escape_json, escape_line
from router.cli.errors import CommandError, describe_os_error

_UTF8 = "utf"
_DUMB = frozenset({"", "dumb", "unknown"})


def print_line(text: object = "", *, flush: bool = False) -> None:
    """Write one line to standard output; escape line ends within `text`."""
    _write(sys.stdout, escape_line(str(text)), flush=flush)


def print_block(text: str, *, flush: bool = False) -> None:
    """Write text of several lines to standard output."""
    _write(sys.stdout, escape_block(text), flush=flush)


def print_part(text: str, *, to_errors: bool = False) -> None:
    """Write a part of a text that grows to standard output, or to standard error, at once."""
    _write(sys.stderr if to_errors else sys.stdout, escape_block(text), flush=True, end="")


def print_error(text: object) -> None:
    """Write a message of one or more lines to standard error."""
    with contextlib.suppress(OSError, CommandError):  # it cannot be reported anywhere
        _write(sys.stderr, escape_block(str(text)), flush=True)


def print_json(value: object, *, indent: int | None = 2, flush: bool = False) -> None:
    """Write one JSON document to standard output."""
    document = json.dumps(value, indent=indent, ensure_ascii=not _is_utf8(sys.stdout))
    _write(sys.stdout, escape_json(document), flush=flush)


def is_error_stream(stream: object) -> bool:
    """Return whether a stream that a library writes to is standard error."""
    return stream is None or stream is sys.stderr


def input_is_terminal() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_line(prompt: str) -> str:
    """Read a line that is typed, which can be edited; raise EOFError at the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it
    return input(prompt)


def output_is_terminal() -> bool:
    """Return whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def screen_is_possible() -> bool:
    """Return whether standard output is a terminal with a screen to redraw."""
    return output_is_terminal() and os.environ.get("TERM", "dumb") not in _DUMB


def output_is_utf8() -> bool:
    """Return whether standard output takes every character."""
    return _is_utf8(sys.stdout)


def errors_are_terminal() -> bool:
    """Return whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def terminal_columns() -> int:
    """Return the width of the terminal in characters."""
    return shutil.get_terminal_size().columns


def flush_output() -> None:
    """Flush standard output; raise CommandError if that fails."""
    if sys.stdout is not None:
        with _explain_failure(sys.stdout):
            sys.stdout.flush()


def discard_output() -> None:
    """Redirect standard output to /dev/null, so that Python's exit does not fail on it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class ProgressBar:
    """A progress bar on standard error."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def advance(self, count: int) -> None:
        """Advance by a number of units."""
        self._bar.advance(self._task, count)

    def update(self, completed: int, label: str) -> None:
        """Set the completed amount and the label."""
        self._bar.update(self._task, completed=completed, description=escape_line(label))

    def stop(self) -> None:
        """End the bar and leave it as it is."""
        self._bar.stop()


def start_bar(label: str, total: int, *, counts_bytes: bool = False) -> ProgressBar:
    """Show a bar on standard error until it is stopped."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    if counts_bytes:
        speed = (TransferSpeedColumn(), TimeRemainingColumn())
        bar = Progress(text, BarColumn(), DownloadColumn(binary_units=True), *speed,
                       console=Console(stderr=True))  # fmt: skip
    else:
        bar = Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
                       console=Console(stderr=True))  # fmt: skip
    bar.start()
    return ProgressBar(bar, bar.add_task(escape_line(label), total=total))


class LiveScreen:
    """Screen of the whole terminal, which is left as it was found, also by SIGTERM."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._keyboard = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._mode: list[Any] | None = None

    def __enter__(self) -> Self:
        self._on_end = signal.signal(signal.SIGTERM, _interrupt)
        if self._keyboard is not None:
            self._mode = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard)
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if self._keyboard is not None and self._mode is not None:
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._mode)
        signal.signal(signal.SIGTERM, self._on_end)

    def size(self) -> tuple[int, int]:
        """Return the terminal's columns and rows."""
        return self._console.size.width, self._console.size.height

    def show(self, lines: Sequence[tuple[str, str]]) -> None:
        """Draw lines of text and style; what does not fit is cut off."""
        from rich.text import Text

        whole = Text(no_wrap=True, overflow="crop")
        for text, style in lines:
            whole.append(f"{_encodable(escape_line(text), sys.stdout)}\n", style)
        whole.rstrip()
        with _explain_failure(sys.stdout):
            self._live.update(whole, refresh=True)

    def key(self, wait_s: float) -> str | None:
        """Return the key that is pressed within `wait_s`, if there is a keyboard."""
        if self._keyboard is None:
            time.sleep(wait_s)
        elif select.select([self._keyboard], [], [], wait_s)[0]:
            return os.read(self._keyboard, 1).decode("ascii", "replace") or None
        return None


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _write(stream: TextIO | None, text: str, *, flush: bool, end: str = "\n") -> None:
    if stream is None:  # closed before this process started
        return
    with _explain_failure(stream):
        stream.write(f"{_encodable(text, stream)}{end}")
        if flush:
            stream.flush()


def _encodable(text: str, stream: TextIO) -> str:
    """Escape the characters that a stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


@contextlib.contextmanager
def _explain_failure(stream: TextIO) -> Iterator[None]:
    """Turn a write error into CommandError; let BrokenPipeError pass."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "standard error" if stream is sys.stderr else "standard output"
        message = f"cannot write to {name}: {describe_os_error(error)}"
        raise CommandError(message) from None


def _is_utf8(stream: TextIO | None) -> bool:
    return stream is None or (stream.encoding or _UTF8).lower().startswith(_UTF8)

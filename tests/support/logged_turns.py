"""Lines that this process logs, with the turns that they name."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fabric.hosting.turn_context import current_turn


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.rows: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message with the turn that a log file would name beside it."""
        self.rows.append((record.getMessage(), current_turn()))


@contextmanager
def logged_turns(name: str) -> Iterator[list[tuple[str, str | None]]]:
    """Collect what a logger writes in a block of code: messages, and turns or None."""
    logger, lines = logging.getLogger(name), _Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        yield lines.rows
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)

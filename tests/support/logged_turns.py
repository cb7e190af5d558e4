"""Lines logged by this process, with their turns."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from fabric.hosting.turn_context import current_turn


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.rows: list[tuple[str, str | None]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Store the message with the turn that a log file would show beside it."""
        self.rows.append((record.getMessage(), current_turn()))


@contextmanager
def logged_turns(name: str) -> Iterator[list[tuple[str, str | None]]]:
    """Collect a logger's messages, each with its turn or None, during a block of code."""
    logger, lines = logging.getLogger(name), _Lines()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    try:
        yield lines.rows
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)

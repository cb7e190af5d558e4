"""Threads reserved for work that a client's next token waits for.

All other threads may be busy saving, restoring and checking blocks, or copying agents for an hour.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LOW_LATENCY = ContextVar("low_latency", default=False)


@contextmanager
def low_latency() -> Iterator[None]:
    """Run the work of this task, and of those it starts, on the reserved threads."""
    token = _LOW_LATENCY.set(True)
    try:
        yield
    finally:
        _LOW_LATENCY.reset(token)


def is_low_latency() -> bool:
    """Return whether this task's work runs on the reserved threads."""
    return _LOW_LATENCY.get()

"""Work that a client's next token waits for, on threads that nothing else fills.

The other threads may all be at work: saving, restoring and checking blocks, or copying agents
for an hour.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LOW_LATENCY = ContextVar("low_latency", default=False)


@contextmanager
def low_latency() -> Iterator[None]:
    """Let the work of this task, and of those that it starts, go to the threads kept free."""
    token = _LOW_LATENCY.set(True)
    try:
        yield
    finally:
        _LOW_LATENCY.reset(token)


def is_low_latency() -> bool:
    """Say whether a client's next token waits for this task's work."""
    return _LOW_LATENCY.get()

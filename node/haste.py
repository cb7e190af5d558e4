"""What a move does while its client's stream is silent, on threads that nothing else fills.

The other threads may all be at work: saving, restoring and checking blocks, or copying agents
for an hour.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IN_HASTE = ContextVar("in_haste", default=False)


@contextmanager
def haste() -> Iterator[None]:
    """Let the work of this task, and of those that it starts, go to the threads kept free."""
    token = _IN_HASTE.set(True)
    try:
        yield
    finally:
        _IN_HASTE.reset(token)


def in_haste() -> bool:
    """Say whether a client's next token waits for this task's work."""
    return _IN_HASTE.get()

"""Wait for a state of threads, processes and sockets, no longer than a minute."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 60.0
POLL_S = 0.02

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = WAIT_S) -> T:
    """Wait until `condition()` is true; return its value."""
    end_s = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"the condition was false for {timeout_s:g} s"
        threading.Event().wait(POLL_S)  # not time.sleep, which some tests replace
    return value

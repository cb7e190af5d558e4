"""Keep a process that streams tokens from stopping for its own housekeeping.

What a process holds once it is ready (modules, a tokenizer's tables) lives as long as it does,
yet a full garbage collection walked all of it: 50-110 ms in the router, in mid-answer.
"""

import gc
import sys
from typing import Final

SWITCH_S: Final = 0.001  # Python's own is 5 ms, which a token waits for a thread that computes


def keep_pauses_short() -> None:
    """Leave out of every later collection what is there now; call it once a process is ready."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)

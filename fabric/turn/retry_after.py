"""Suggest when a client that a full queue refused should retry."""

from typing import Final

from fabric.limits import RETRY_AFTER_S_MAX

RETRY_AFTER_S_MIN: Final = 1.0


def retry_after_s(waiting_count: int, running_count: int, turns_per_s: float) -> float:
    """Return the seconds until half of a queue has been served.

    `turns_per_s` is the speed of one slot, 0 if unmeasured. Waiting for the whole queue would be
    too late; waiting for its first slot would bring all clients back at once.
    """
    if turns_per_s <= 0:
        return RETRY_AFTER_S_MIN
    wait_s = waiting_count / 2 / (turns_per_s * max(1, running_count))
    return min(max(wait_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

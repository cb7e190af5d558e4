"""When a client that was refused for a full line does well to come again."""

from typing import Final

from fabric.limits import RETRY_AFTER_S_MAX

RETRY_AFTER_S_MIN: Final = 1.0


def retry_after_s(waiting_count: int, running_count: int, turns_per_s: float) -> float:
    """Return the seconds until half of a line has gone.

    `turns_per_s` is how fast one place is done with turns, 0 where nothing was measured yet. At
    the line's end everybody would come again too late, and for its first place all at once.
    """
    if turns_per_s <= 0:
        return RETRY_AFTER_S_MIN
    wait_s = waiting_count / 2 / (turns_per_s * max(1, running_count))
    return min(max(wait_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)

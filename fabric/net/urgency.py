"""What blocks are wanted for, which decides who waits where two transfers share a link."""

from enum import IntEnum


class Urgency(IntEnum):
    """Why blocks are fetched; the greater goes first."""

    PREFETCH = 0  # nobody waits: a replica, a guess
    FETCH = 1  # a turn waits for a part of its prefix
    MIGRATION_COPY = 2  # the agent still serves on the source
    MIGRATION_TAIL = 3  # the agent serves nowhere until this is over

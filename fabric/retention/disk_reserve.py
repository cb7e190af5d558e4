"""Disk reserve: the part of a drive that is left to other uses."""

from fabric.limits import DISK_RESERVE_BYTES_MAX, DISK_RESERVE_BYTES_MIN, DISK_RESERVE_SHARE


def disk_reserve_bytes(drive_bytes: int, usable_bytes: int) -> int:
    """Return how many bytes of a drive stay free.

    A tenth of the drive, 10 to 64 GiB. On a drive that is nearly full: half of what is free or
    holds stored agents (`usable_bytes`), so that agents are still stored there.
    """
    share = int(drive_bytes * DISK_RESERVE_SHARE)
    wanted = min(max(share, DISK_RESERVE_BYTES_MIN), DISK_RESERVE_BYTES_MAX)
    return min(wanted, max(0, usable_bytes) // 2)


def disk_capacity_bytes(drive_bytes: int, free_bytes: int, stored_bytes: int) -> int:
    """Return how many bytes stored agents may fill of a drive, without regard to the budget.

    What is stored already may stay, however full others make the drive.
    """
    reserve_bytes = disk_reserve_bytes(drive_bytes, free_bytes + stored_bytes)
    return stored_bytes + max(0, free_bytes - reserve_bytes)

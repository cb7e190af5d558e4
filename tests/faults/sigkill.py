"""Forked victims that die by SIGKILL before or during one of their disk operations.

The scripts that use it run as processes of their own, so that neither pytest nor its libraries
are in the processes that die.
"""

import os
import signal
import traceback
from itertools import count

from node.store.posix_disk import PosixDisk


def arm(point, operations, *, torn):
    """Kill this process at operation number `point`; if torn, after half of the operation."""
    numbers = count()
    for name in operations:
        call = getattr(os, name)

        def counted(*args, _call=call, _name=name, **kwargs):
            if next(numbers) == point:
                if torn and _name == "writev":
                    whole = b"".join(bytes(view) for view in args[1])
                    os.write(args[0], whole[: len(whole) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            # The page cache outlives a process, so flushing it would only cost time.
            return None if _name == "fsync" else _call(*args, **kwargs)

        setattr(os, name, counted)


def die_at(point, root, operations, take, *, torn):
    """Fork a process that does `take(disk, acknowledge)` until it dies; return whether it did."""
    acknowledgements = os.open(f"{root}.acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    victim = os.fork()
    if victim == 0:
        arm(point, operations, torn=torn)
        try:
            disk = PosixDisk(root, "full")
            take(disk, lambda number: os.write(acknowledgements, b"%d\n" % number))
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a forked child must not return
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(victim, 0)
    os.close(acknowledgements)
    assert status in (0, signal.SIGKILL), "a victim is killed or finishes its work"
    return os.WIFSIGNALED(status)

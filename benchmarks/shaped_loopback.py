"""A loopback interface of this thread, on which `tc` limits the send rate of chosen ports.

Only the data planes of nodes in this process are shaped; requests of clients and routers pass at
full speed. It needs root on Linux. Threads started within the block use it, too.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from benchmarks.namespaces import run

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_OWN = "/proc/thread-self/ns/net"
_MTU_BYTES, _BURST_BYTES = 1_500, 8 * 1024  # more would exempt small transfers from the limit


@contextmanager
def own_loopback() -> Iterator[None]:
    """Move this thread into a new network namespace for a block of code."""
    before = os.open(_OWN, os.O_RDONLY)
    try:
        _check(_LIBC.unshare(_CLONE_NEWNET), "unshare")
        try:
            run("ip", "link", "set", "lo", "up", "mtu", str(_MTU_BYTES))
            yield
        finally:
            _check(_LIBC.setns(before, _CLONE_NEWNET), "setns")
    finally:
        os.close(before)


def shape_ports(ports: Iterable[int], rate_mbit: float) -> None:
    """Limit the total send rate of these ports."""
    run("tc", "qdisc", "del", "dev", "lo", "root", check=False)
    run("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb", "default", "1")
    free = ("htb", "rate", "100gbit", "quantum", "60000")
    run("tc", "class", "add", "dev", "lo", "parent", "1:", "classid", "1:1", *free)
    rate, burst = f"{round(1000 * rate_mbit)}kbit", str(_BURST_BYTES)
    slow = ("htb", "rate", rate, "ceil", rate, "burst", burst, "cburst", burst, "quantum", "1500")
    run("tc", "class", "add", "dev", "lo", "parent", "1:", "classid", "1:2", *slow)
    for port in ports:
        match = ("match", "ip", "sport", str(port), "0xffff", "flowid", "1:2")
        kind = ("parent", "1:", "protocol", "ip", "prio", "1", "u32")
        run("tc", "filter", "add", "dev", "lo", *kind, *match)


def _check(status: int, name: str) -> None:
    if status:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")

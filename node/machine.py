"""The machine's memory, memory pressure and thermal state.

Pressure is the system's own measure, not a count of free bytes: macOS and Linux fill all memory
with caches that they drop when it is needed. Source: `kern.memorystatus_vm_pressure_level`
is 1, 2 or 4 (xnu, `bsd/sys/event.h`); Linux's `Documentation/accounting/psi.rst`.
"""

import ctypes
import ctypes.util
import os
import re
import sys
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Final

from fabric.control.node_calls import THERMAL_STATES
from fabric.limits import KIB

LEVEL_NAME: Final = b"kern.memorystatus_vm_pressure_level"
STALLS: Final = Path("/proc/pressure/memory")
GROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
GROUP_EVENTS: Final = Path("/sys/fs/cgroup/memory.events")
MEMINFO: Final = Path("/proc/meminfo")
STATM: Final = Path("/proc/self/statm")
SWAP_NAME: Final = b"vm.swapusage"
_SWAP_WORDS: Final = 4  # of xsw_usage: total, free, used, and the size of a page; `sys/sysctl.h`
_USED_WORD: Final = 2
_USAGE_WORDS: Final = 10  # of rusage_info_v0 after its uuid; `bsd/sys/resource.h`
_FOOTPRINT_WORD: Final = 7
# Percent of the last ten seconds in which some task, or all of them, waited for memory.
SOME_WARNING_PERCENT: Final = 10.0
FULL_CRITICAL_PERCENT: Final = 10.0
_QOS_USER_INITIATED: Final = 0x19
_SWAP: Final = re.compile(r"^Swap(Total|Free):\s+(\d+) kB$", re.MULTILINE)
_STALL: Final = re.compile(r"^(some|full) avg10=(\d+(?:\.\d+)?)", re.MULTILINE)


class Pressure(IntEnum):
    """Memory pressure of the system."""

    NORMAL = 1
    WARNING = 2
    CRITICAL = 4

    @property
    def word(self) -> str:
        """Name of the level in messages, one of PRESSURES."""
        return self.name.lower()


def ram_bytes(group_limit: Path = GROUP_LIMIT) -> int:
    """Return the RAM of this machine, or of the container that this process runs in."""
    installed_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(installed_bytes, int(group_limit.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return installed_bytes


def process_bytes(platform: str = sys.platform) -> int | None:
    """Return the RAM that this process takes; on macOS as Activity Monitor shows it."""
    if platform == "darwin":
        return _footprint_bytes()
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def swap_bytes(platform: str = sys.platform, meminfo: Path = MEMINFO) -> int | None:
    """Return the swap space that this machine has in use."""
    if platform == "darwin":
        return _swap_used_bytes()
    try:
        sizes = dict(_SWAP.findall(meminfo.read_text()))
        return (int(sizes["Total"]) - int(sizes["Free"])) * KIB
    except (OSError, KeyError):
        return None


def out_of_memory_kills(events: Path = GROUP_EVENTS) -> int | None:
    """Return how many processes Linux has killed in this container for lack of memory."""
    try:
        match = re.search(r"^oom_kill (\d+)$", events.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def memory_pressure(platform: str = sys.platform) -> Pressure:
    """Return the system's memory pressure, or NORMAL if it reports none."""
    if platform == "darwin":
        return pressure_of_level(_read_level())
    try:
        return pressure_of_stalls(STALLS.read_text())
    except OSError:
        return Pressure.NORMAL


def pressure_of_level(level: int | None) -> Pressure:
    """Convert macOS's level."""
    if level is None or level < Pressure.WARNING:
        return Pressure.NORMAL
    return Pressure.WARNING if level < Pressure.CRITICAL else Pressure.CRITICAL


def pressure_of_stalls(text: str) -> Pressure:
    """Convert Linux's shares of time in which tasks waited for memory."""
    stalls = {kind: float(percent) for kind, percent in _STALL.findall(text)}
    if stalls.get("full", 0.0) >= FULL_CRITICAL_PERCENT:
        return Pressure.CRITICAL
    if stalls.get("some", 0.0) >= SOME_WARNING_PERCENT:
        return Pressure.WARNING
    return Pressure.NORMAL


def thermal_state(platform: str = sys.platform) -> str:
    """Return the thermal state that macOS reports, one of THERMAL_STATES."""
    if platform != "darwin":
        return THERMAL_STATES[0]
    state = _read_thermal_state()
    return THERMAL_STATES[min(max(state, 0), len(THERMAL_STATES) - 1)]


def ask_for_fast_cores(platform: str = sys.platform) -> bool:
    """Request performance cores for this thread; return whether the system accepts that.

    Without it macOS may run a program that an ssh login or a daemon started on efficiency cores.
    Source: `pthread/qos.h`.
    """
    if platform != "darwin":
        return False
    call: Callable[..., int] = _library("c").pthread_set_qos_class_self_np
    return call(ctypes.c_uint(_QOS_USER_INITIATED), ctypes.c_int(0)) == 0


def _read_thermal_state() -> int:
    """Ask `NSProcessInfo`, which is in Foundation."""
    _library("Foundation")
    objc = _library("objc")
    objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p
    send = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
        ("objc_msgSend", objc)
    )
    info = send(objc.objc_getClass(b"NSProcessInfo"), objc.sel_registerName(b"processInfo"))
    return int(send(info, objc.sel_registerName(b"thermalState")) or 0)


def _footprint_bytes() -> int | None:
    usage = (ctypes.c_uint64 * (2 + _USAGE_WORDS))()
    read: Callable[..., int] = _library("c").proc_pid_rusage
    return None if read(os.getpid(), 0, ctypes.byref(usage)) else int(usage[2 + _FOOTPRINT_WORD])


def _swap_used_bytes() -> int | None:
    read: Callable[..., int] = _library("c").sysctlbyname
    usage = (ctypes.c_uint64 * _SWAP_WORDS)()
    size = ctypes.c_size_t(ctypes.sizeof(usage))
    failed = read(SWAP_NAME, ctypes.byref(usage), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else int(usage[_USED_WORD])


@cache
def _library(name: str) -> ctypes.CDLL:
    return ctypes.CDLL(ctypes.util.find_library(name))


def _read_level() -> int | None:
    read: Callable[..., int] = _library("c").sysctlbyname
    level, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = read(LEVEL_NAME, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return None if failed else level.value

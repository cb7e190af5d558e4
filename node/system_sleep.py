"""Sleep of a Mac as an orderly leave and return; other systems send no notice.

    notice ─▶ refuse turns ─▶ end and save those that run ─▶ a heartbeat reports `asleep` ─▶ sleep
    wake   ─▶ the next heartbeat reports `ready` again

The router ends the lease of a node that reports `asleep` at once, and serves its agents elsewhere
as if it had waited for the lease to expire. macOS waits up to 30 s for the answer to its notice.
Source: `IORegisterForSystemPower` in IOKit/pwr_mgt/IOPMLib.h; messages in IOKit/IOMessage.h.
"""

import asyncio
import ctypes
import logging
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, Protocol

from fabric.control.node_calls import ASLEEP
from node.limits import SLEEP_NOTICE_S, SLEEP_REPORT_S
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns

_FRAMEWORKS: Final = "/System/Library/Frameworks"
_CAN_SLEEP: Final = 0xE0000270  # sent by an idle Mac; `caffeinate` prevents it during work
_WILL_SLEEP: Final = 0xE0000280
_HAS_POWERED_ON: Final = 0xE0000300
_COMMON_MODES: Final = "kCFRunLoopCommonModes"

_log = logging.getLogger(__name__)


class SleepNotices(Protocol):
    """Notices of the system, delivered on a thread of their own."""

    def start(self, on_sleep: Callable[[], None], on_wake: Callable[[], None]) -> None:
        """Call `on_sleep` before each sleep, which waits for its return, and `on_wake` after it."""
        ...

    def stop(self) -> None:
        """Stop delivering notices."""
        ...


class SystemSleep:
    """Leaves the fabric before its machine sleeps; its coroutines run on its node's event loop."""

    def __init__(
        self,
        health: Health,
        live_turns: LiveTurns,
        flush: Callable[[], Awaitable[int]],
        notices: SleepNotices | None,
    ) -> None:
        """`flush` saves idle agents and returns the number that are in memory only."""
        self._health = health
        self._live_turns = live_turns
        self._flush = flush
        self._notices = notices
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reported = asyncio.Event()

    def start(self) -> None:
        """Begin to follow the system's notices, if it sends any."""
        self._loop = asyncio.get_running_loop()
        if self._notices is not None:
            self._notices.start(self._on_sleep, self._on_wake)

    async def stop(self) -> None:
        """Follow no further notice."""
        if self._notices is not None:
            await asyncio.to_thread(self._notices.stop)

    def note_report(self, state: str) -> None:
        """Note that a heartbeat's answer has this state of the node."""
        if state == ASLEEP:
            self._reported.set()

    async def leave(self) -> None:
        """End the turns, save all agents, and wait a little for a heartbeat of the router."""
        self._reported.clear()
        self._health.is_asleep = True
        await self._live_turns.cancel()
        unsaved = await self._flush()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reported.wait(), SLEEP_REPORT_S)
        _log.info("this machine goes to sleep; %d agents are in memory only", unsaved)

    async def come_back(self) -> None:
        """Accept turns again."""
        self._health.is_asleep = False
        _log.info("this machine is awake again")

    def _on_sleep(self) -> None:
        self._run(self.leave())

    def _on_wake(self) -> None:
        self._run(self.come_back())

    def _run(self, step: Any) -> None:
        assert self._loop is not None, "start first"
        future = asyncio.run_coroutine_threadsafe(step, self._loop)
        try:
            future.result(SLEEP_NOTICE_S)
        except TimeoutError:
            future.cancel()
            _log.warning("this machine sleeps before all agents are saved")


def system_notices(platform: str = sys.platform) -> SleepNotices | None:
    """Return the system's notices, or None if it sends none."""
    return MacSleepNotices() if platform == "darwin" else None


class MacSleepNotices:
    """Notices of IOKit, on a thread that runs a CFRunLoop."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        """`load` opens a framework's library."""
        self._iokit = load(f"{_FRAMEWORKS}/IOKit.framework/IOKit")
        self._core = load(f"{_FRAMEWORKS}/CoreFoundation.framework/CoreFoundation")
        self._declare()
        self._root = 0  # the connection on which sleep is allowed
        self._run_loop: int | None = None
        self._is_ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._callback: Any = None  # ctypes frees it with the last reference

    def start(self, on_sleep: Callable[[], None], on_wake: Callable[[], None]) -> None:
        """Begin to deliver notices."""
        self._callback = _POWER_CALLBACK(
            lambda _, __, message, argument: self._deliver(message, argument, on_sleep, on_wake)
        )
        self._thread = threading.Thread(target=self._run, name="sleep-notices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is None:
            return
        self._is_ready.wait(SLEEP_NOTICE_S)
        if self._run_loop is not None:
            self._core.CFRunLoopStop(self._run_loop)
        self._thread.join(SLEEP_NOTICE_S)

    def _run(self) -> None:
        port, notifier = ctypes.c_void_p(), ctypes.c_uint32()
        self._root = self._iokit.IORegisterForSystemPower(
            None, ctypes.byref(port), self._callback, ctypes.byref(notifier)
        )
        if not self._root:
            _log.warning("macOS gives no notice of its sleep: other Macs notice it seconds later")
            self._is_ready.set()
            return
        self._run_loop = self._core.CFRunLoopGetCurrent()
        source = self._iokit.IONotificationPortGetRunLoopSource(port)
        self._core.CFRunLoopAddSource(self._run_loop, source, self._common_modes())
        self._is_ready.set()
        self._core.CFRunLoopRun()
        self._iokit.IODeregisterForSystemPower(ctypes.byref(notifier))
        self._iokit.IOServiceClose(self._root)
        self._iokit.IONotificationPortDestroy(port)

    def _common_modes(self) -> ctypes.c_void_p:
        return ctypes.c_void_p.in_dll(self._core, _COMMON_MODES)

    def _deliver(
        self,
        message: int,
        argument: int | None,
        on_sleep: Callable[[], None],
        on_wake: Callable[[], None],
    ) -> None:
        if message == _HAS_POWERED_ON:
            on_wake()
            return
        if message == _WILL_SLEEP:
            on_sleep()
        if message in {_CAN_SLEEP, _WILL_SLEEP}:
            self._iokit.IOAllowPowerChange(self._root, argument or 0)

    def _declare(self) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_uint32
        for function, result, arguments in (
            (
                self._iokit.IORegisterForSystemPower,
                number,
                [pointer, pointer, _POWER_CALLBACK, pointer],
            ),
            (self._iokit.IOAllowPowerChange, ctypes.c_int, [number, ctypes.c_long]),
            (self._iokit.IONotificationPortGetRunLoopSource, pointer, [pointer]),
            (self._iokit.IONotificationPortDestroy, None, [pointer]),
            (self._iokit.IODeregisterForSystemPower, ctypes.c_int, [pointer]),
            (self._iokit.IOServiceClose, ctypes.c_int, [number]),
            (self._core.CFRunLoopGetCurrent, pointer, []),
            (self._core.CFRunLoopAddSource, None, [pointer, pointer, pointer]),
            (self._core.CFRunLoopStop, None, [pointer]),
            (self._core.CFRunLoopRun, None, []),
        ):
            function.restype, function.argtypes = result, arguments


_POWER_CALLBACK: Final = ctypes.CFUNCTYPE(
    None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p
)

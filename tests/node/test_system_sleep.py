"""A node leaves its fabric before its machine sleeps, and returns when it wakes."""

import asyncio
import ctypes
import sys
import threading

import pytest

from fabric.control.node_calls import ASLEEP, READY
from node import system_sleep
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.system_sleep import MacSleepNotices, SystemSleep

CAN_SLEEP, WILL_SLEEP, HAS_POWERED_ON = 0xE0000270, 0xE0000280, 0xE0000300


class Notices:
    """Notices that a test sends from a separate thread, as the system does."""

    def start(self, on_sleep, on_wake):
        self.on_sleep, self.on_wake = on_sleep, on_wake

    def stop(self):
        self.is_stopped = True


class Machine:
    """A node's health and turns on a machine that sleeps."""

    def __init__(self, flush_s=0.0):
        self.health, self.notices = Health("node-a"), Notices()
        self.live_turns, self.flushes, self.flush_s = LiveTurns(self.health), [], flush_s
        self.sleep = SystemSleep(self.health, self.live_turns, self._flush, self.notices)
        self.is_flushing = asyncio.Event()
        self.sleep.start()

    async def _flush(self):
        self.flushes.append(self.health.state)
        self.is_flushing.set()
        await asyncio.sleep(self.flush_s)
        return 0

    async def wait_until_asleep(self):
        async with asyncio.timeout(60):
            await self.is_flushing.wait()


def test_machine_sleeps_after_a_heartbeat_reports_asleep():
    async def scenario():
        machine = Machine()
        notice = asyncio.create_task(asyncio.to_thread(machine.notices.on_sleep))
        await machine.wait_until_asleep()
        refusal, is_held = machine.health.stopping, not notice.done()
        machine.sleep.note_report(machine.health.state)
        await notice
        await asyncio.to_thread(machine.notices.on_wake)
        return refusal, is_held, machine

    refusal, is_held, machine = asyncio.run(scenario())

    assert refusal.code == "stopping"
    assert "asleep" in refusal.message
    assert is_held
    assert machine.flushes == [ASLEEP]  # no turn begins while agents are saved
    assert machine.health.state == READY
    assert machine.health.stopping is None


def test_machine_without_router_sleeps_after_a_short_wait(monkeypatch):
    monkeypatch.setattr(system_sleep, "SLEEP_REPORT_S", 0.05)

    async def scenario():
        machine = Machine()
        await asyncio.to_thread(machine.notices.on_sleep)
        return machine.health.state

    assert asyncio.run(scenario()) == ASLEEP


def test_hanging_disk_does_not_delay_sleep(monkeypatch, caplog):
    monkeypatch.setattr(system_sleep, "SLEEP_NOTICE_S", 0.1)

    async def scenario():
        await asyncio.to_thread(Machine(flush_s=3600).notices.on_sleep)

    asyncio.run(scenario())

    assert "before all agents are saved" in caplog.text


class Library:
    """A framework whose functions record their calls."""

    def __init__(self, calls, answers):
        self.calls, self.answers = calls, answers

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            answer = self.answers.get(name)
            return answer(*arguments) if callable(answer) else answer

        setattr(self, name, call)
        return call


class Mac(MacSleepNotices):
    """An IOKit whose run loop runs until it is stopped."""

    def __init__(self, root=7):
        self.calls, ended = [], threading.Event()
        answers = {
            "IORegisterForSystemPower": root,
            "CFRunLoopGetCurrent": 11,
            "CFRunLoopRun": ended.wait,
            "CFRunLoopStop": lambda _: ended.set(),
        }
        super().__init__(lambda _: Library(self.calls, answers))

    def _common_modes(self):
        return ctypes.c_void_p(3)

    def named(self, name):
        return [arguments for each, arguments in self.calls if each == name]


def test_macos_notices_are_answered_after_handling():
    mac, handled = Mac(), []

    def on_sleep():
        handled.append(("sleep", len(mac.named("IOAllowPowerChange"))))

    mac.start(on_sleep, lambda: handled.append("wake"))
    assert mac._is_ready.wait(60)
    for message, argument in ((CAN_SLEEP, 21), (WILL_SLEEP, 22), (HAS_POWERED_ON, None)):
        mac._callback(None, 0, message, argument)
    mac.stop()

    assert mac.named("IOAllowPowerChange") == [(7, 21), (7, 22)]
    assert handled == [("sleep", 1), "wake"]
    assert mac.named("CFRunLoopStop") == [(11,)]
    assert mac.named("IODeregisterForSystemPower")


def test_failed_registration_is_logged_and_harmless(caplog):
    mac = Mac(root=0)
    mac.start(lambda: None, lambda: None)
    mac.stop()

    assert "gives no notice" in caplog.text
    assert not mac.named("CFRunLoopRun")


@pytest.mark.mac
@pytest.mark.skipif(sys.platform != "darwin", reason="needs macOS")
def test_iokit_accepts_registration():
    notices = MacSleepNotices()
    notices.start(lambda: None, lambda: None)

    assert notices._is_ready.wait(60)
    assert notices._root
    notices.stop()

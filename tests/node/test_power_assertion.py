"""A Mac stays awake while its node has work, by a program that ends with the node."""

import asyncio
import os
import sys
import time
from functools import partial

import pytest

from node import mac_services
from node import service as service_module
from node.mac_services import IDLE_S, RETRY_S, PowerAssertion, caffeinate_command
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

pytestmark = pytest.mark.anyio
PROGRAM = """#!/bin/sh
echo "$@" >> "{log}"
exec sleep 600
"""


@pytest.fixture
def anyio_backend():
    return "asyncio"


class Bench:
    """A stand-in for caffeinate, a clock, and a node with or without work."""

    def __init__(self, folder, monkeypatch):
        self.log, self.program = folder / "log", folder / "caffeinate"
        self.program.write_text(PROGRAM.format(log=self.log))
        self.program.chmod(0o755)
        monkeypatch.setattr(mac_services, "CAFFEINATE", str(self.program))
        self.now_s, self.is_busy, self.failed_rounds = 1_000.0, False, 0
        self.power = PowerAssertion(
            lambda: self.is_busy, lambda: self.now_s, self._note_failed_round, "darwin"
        )

    def _note_failed_round(self):
        self.failed_rounds += 1

    async def step(self, seconds=0.0):
        self.now_s += seconds
        await self.power._step()

    @property
    def starts(self):
        return self.log.read_text().splitlines() if self.log.exists() else []

    def _wait_for_start(self):
        deadline_s = time.monotonic() + 30
        while not self.starts and time.monotonic() < deadline_s:
            time.sleep(0.01)

    async def wait_for_start(self):
        await asyncio.to_thread(self._wait_for_start)


@pytest.fixture
async def bench(tmp_path, monkeypatch):
    rig = Bench(tmp_path, monkeypatch)
    yield rig
    rig.power._release()


def test_assertion_lets_the_display_sleep():
    assert caffeinate_command(42) == ["/usr/bin/caffeinate", "-i", "-s", "-m", "-w", "42"]


async def test_assertion_is_held_during_work_and_some_seconds_longer(bench):
    await bench.step()
    assert not bench.power.is_held
    bench.is_busy = True
    for _ in range(3):
        await bench.step(2.0)
        assert bench.power.is_held
    await bench.wait_for_start()
    assert bench.starts == [f"-i -s -m -w {os.getpid()}"]
    bench.is_busy = False
    await bench.step(IDLE_S - 1)
    assert bench.power.is_held, "an agent soon returns with the result of a tool"
    await bench.step(1.0)
    assert not bench.power.is_held
    bench.is_busy = True
    await bench.step(1.0)
    assert bench.power.is_held, "acquired again at once, without a delay after the release"


async def test_crashed_program_is_restarted_after_a_delay(bench):
    bench.is_busy = True
    await bench.step()
    bench.power._process.kill()
    bench.power._process.wait()
    await bench.step(2.0)
    assert not bench.power.is_held
    await bench.step(RETRY_S)
    assert bench.power.is_held


async def test_missing_program_is_logged_once_and_node_keeps_serving(bench, caplog):
    bench.program.unlink()
    bench.is_busy = True
    for _ in range(5):
        await bench.step(2.0)
    assert bench.failed_rounds == 0
    (message,) = [r.getMessage() for r in caplog.records if "may sleep" in r.getMessage()]
    assert "No such file" in message


async def test_stop_releases_the_assertion(bench):
    bench.is_busy = True
    bench.power.start()
    await bench.wait_for_start()
    process = bench.power._process
    await bench.power.stop()
    assert process.poll() is not None
    assert not bench.power.is_held


def test_node_holds_assertion_from_first_turn_until_stop(tmp_path, monkeypatch):
    bench = Bench(tmp_path, monkeypatch)
    on_macos = partial(PowerAssertion, platform="darwin")
    monkeypatch.setattr(service_module, "PowerAssertion", on_macos)
    monkeypatch.setattr(mac_services, "POLL_S", 0.01)
    with running(tmp_path / "disk", str(write_model(tmp_path / "model", ONE_LAYER))) as service:
        assert bench.starts == [], "the node has no work"
        ask(service, "the cat", agent="a", max_tokens=200, ignore_eos=True)
        bench._wait_for_start()
        process = service._power._process
        assert process.poll() is None
    assert process.poll() is not None


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has the program")
async def test_other_systems_start_no_program(bench):
    other = PowerAssertion(lambda: True, lambda: 0.0, bench._note_failed_round)
    other.start()
    await asyncio.sleep(0.05)
    await other.stop()
    assert bench.starts == []

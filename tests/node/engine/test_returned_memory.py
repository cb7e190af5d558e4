"""Freed memory is returned after long prompts, within long answers, and when idle."""

import time

import mlx.core as mx
import pytest

from fabric.errors import FatalError
from fabric.limits import GIB
from fabric.memory_plan import MachineMemory, plan_memory
from node.engine import engine_thread
from node.engine.engine_thread import EngineThread
from node.limits import DEVICE_POOL_PREFILL_TOKENS, DEVICE_POOL_STEPS
from node.mlx import backend, device
from node.mlx.loaded_model import load_model, weights_bytes
from tests.node.fake_engine import FakeClock, FakeEngine, SchedulerRig

PLAN = plan_memory(MachineMemory(16 * GIB, 11 * GIB, 499_000), weights_bytes("recall"))


class Calls(list):
    """Recorded calls to MLX, in order."""

    def note(self, name):
        return lambda *arguments, **_: self.append((name, *arguments))


@pytest.fixture
def calls(monkeypatch):
    found = Calls()
    for name in (
        "set_cache_limit",
        "set_memory_limit",
        "clear_cache",
        "synchronize",
        "set_wired_limit",
    ):
        monkeypatch.setattr(mx, name, found.note(name))
    return found


@pytest.mark.parametrize("here", [backend.CPU, backend.METAL, backend.CUDA])
def test_gpu_memory_and_pool_limits_are_set_before_loading(calls, monkeypatch, here):
    monkeypatch.setattr(backend, "current", lambda: here)
    monkeypatch.setattr("node.mlx.loaded_model.load", calls.note("load"))
    with pytest.raises(FatalError):  # no model was loaded
        load_model("recall", memory=PLAN)

    names = [call for call in calls if call[0] != "load"]
    limits = [("set_memory_limit", PLAN.share_bytes), ("set_cache_limit", PLAN.pool_bytes)]
    assert names == (limits if here.is_gpu else [])
    assert calls[-1][0] == "load"


def test_pending_work_is_synchronized_before_memory_is_returned(calls):
    device.return_unused()

    assert [name for name, *_ in calls] == ["synchronize", "clear_cache"]


def test_memory_is_returned_after_long_prefill():
    rig = SchedulerRig()
    for count, returned_count in (
        (DEVICE_POOL_PREFILL_TOKENS, 0),
        (DEVICE_POOL_PREFILL_TOKENS + 1, 1),
    ):
        rig.add(count, answer_tokens=1)
        rig.run()
        assert rig.engine.returned_count == returned_count


def test_memory_is_returned_during_long_answers():
    rig = SchedulerRig()
    rig.add(2, answer_tokens=2 * DEVICE_POOL_STEPS + 10)
    rig.run()

    assert rig.engine.returned_count == 2


def test_idle_engine_returns_memory_once(monkeypatch):
    monkeypatch.setattr(engine_thread, "DEVICE_POOL_IDLE_S", 0.01)
    engine = FakeEngine()
    thread = EngineThread(FakeClock(), active_max=4, waiting_max=4, exact_chunks=False)
    thread.start(lambda: (engine, None))
    try:
        for count in (1, 2):
            deadline_s = time.monotonic() + 60
            while engine.returned_count < count and time.monotonic() < deadline_s:
                time.sleep(0.01)
            time.sleep(0.05)
            assert engine.returned_count == count
            thread.call(lambda: None).result()
    finally:
        thread.stop()


@pytest.mark.parametrize(
    ("info", "memory"),
    [
        (
            {"max_recommended_working_set_size": 11, "resource_limit": 499_000, "memory_size": 16},
            device.GpuMemory(11, 499_000),
        ),
        ({"total_memory": 80, "compute_capability_major": 9}, device.GpuMemory(80, None)),
        ({"architecture": "unknown"}, None),
    ],
    ids=["Metal", "CUDA", "neither"],
)
def test_gpu_memory_is_read_from_device_info(monkeypatch, info, memory):
    monkeypatch.setattr(mx, "device_info", lambda: info)

    assert device.gpu_memory() is None, "no model runs on a GPU here"
    monkeypatch.setattr(backend, "current", lambda: backend.METAL)
    assert device.gpu_memory() == memory

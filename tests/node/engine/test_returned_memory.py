"""Freed memory is returned after long prompts, within long answers, and when idle."""

import ctypes
import subprocess
import sys
import time

import mlx.core as mx
import pytest

from fabric.errors import FatalError
from fabric.limits import GIB, MIB
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


class Library:
    """C library with some functions, whose calls are recorded."""

    def __init__(self, calls, *names):
        for name in names:
            setattr(self, name, calls.note(name))


@pytest.fixture(autouse=True)
def _other_library(calls, monkeypatch):
    monkeypatch.setattr(device, "_C_LIBRARY", Library(calls, "mallopt", "malloc_trim"))


@pytest.mark.parametrize("here", [backend.CPU, backend.METAL, backend.CUDA])
def test_gpu_memory_and_pool_limits_are_set_before_loading(calls, monkeypatch, here):
    monkeypatch.setattr(backend, "current", lambda: here)
    monkeypatch.setattr("node.mlx.loaded_model.load", calls.note("load"))
    with pytest.raises(FatalError):  # no model was loaded
        load_model("recall", memory=PLAN)

    names = [call for call in calls if call[0] != "load"]
    limits = [("set_memory_limit", PLAN.share_bytes), ("set_cache_limit", PLAN.pool_bytes)]
    kept_pages = [("mallopt", -1, PLAN.pool_bytes), ("mallopt", -3, 32 * MIB)]
    assert names == (limits if here.is_gpu else kept_pages)
    assert calls[-1][0] == "load"


@pytest.mark.parametrize("here", [backend.CPU, backend.METAL])
def test_pending_work_is_synchronized_before_memory_is_returned(calls, monkeypatch, here):
    monkeypatch.setattr(backend, "current", lambda: here)
    device.return_unused()

    pages = [] if here.is_gpu else ["malloc_trim"]
    assert [name for name, *_ in calls] == ["synchronize", "clear_cache", *pages]


def test_other_c_libraries_keep_their_own_rules(calls, monkeypatch):
    monkeypatch.setattr(backend, "current", lambda: backend.CPU)
    monkeypatch.setattr(device, "_C_LIBRARY", Library(calls))
    device.limit_memory(PLAN.share_bytes, PLAN.pool_bytes)
    device.return_unused()

    assert [name for name, *_ in calls] == ["synchronize", "clear_cache"]


FAULTS = """
import resource
import mlx.core as mx
from node.mlx import device

mx.set_default_device(mx.cpu)
mx.set_cache_limit(0)  # MLX's own pool reuses arrays of one size; prompts need many

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        mx.eval([mx.zeros((4 << 20,), mx.uint8) + number for number in range(8)])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

device.keep_freed_pages(64 << 20)
faults()
kept = faults()
device.return_unused()
print(kept, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc only")
def test_freed_pages_are_used_again_until_they_are_returned():
    command = [sys.executable, "-c", FAULTS]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kept, returned = map(int, printed.split())

    assert kept < 100, "of 163,840 pages"
    assert returned > 1_000


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

"""Joining and leaving Ray in the router's process: one thread at a time, no result pending."""

import asyncio
import concurrent.futures
import gc
import threading
import weakref

import pytest
import ray

from router.fleet import ray_control

HANG_S = 60.0


class SlowRay:
    """A stand-in for Ray that records its calls; `init` blocks until released."""

    def __init__(self):
        self.calls = []
        self.init_called = threading.Event()
        self.release = threading.Event()

    def init(self, **_):
        self.calls.append("join")
        self.init_called.set()
        assert self.release.wait(HANG_S)
        self.calls.append("joined")

    def shutdown(self):
        self.calls.append("left")


@pytest.fixture
def slow(monkeypatch):
    slow = SlowRay()
    monkeypatch.setattr(ray, "init", slow.init)
    monkeypatch.setattr(ray, "shutdown", slow.shutdown)
    joining = threading.Thread(target=ray_control.connect, args=("here:1",))
    joining.start()
    assert slow.init_called.wait(HANG_S)
    yield slow
    slow.release.set()
    joining.join(HANG_S)


def test_disconnect_waits_for_connect_in_progress(slow):
    leaving = threading.Thread(target=ray_control.disconnect)
    leaving.start()
    leaving.join(0.2)
    assert slow.calls == ["join"]
    slow.release.set()
    leaving.join(HANG_S)
    assert slow.calls == ["join", "joined", "left"]


def test_hung_connect_does_not_block_exit(slow, monkeypatch):
    monkeypatch.setattr(ray_control, "LEAVE_TIMEOUT_S", 0.05)
    ray_control.disconnect()
    assert slow.calls == ["join"]


class Reference:
    """A stand-in for Ray's reference to a pending result."""

    def __init__(self):
        self._result = concurrent.futures.Future()

    def future(self):
        return self._result


async def is_kept(reference):
    await asyncio.sleep(0)
    gc.collect()
    return reference() is not None


@pytest.fixture
def joined(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)


@pytest.mark.anyio
async def test_reference_is_dropped_once_its_result_is_there():
    driver, reference = ray_control.Driver(), Reference()
    result, known = reference.future(), weakref.ref(reference)
    call = asyncio.create_task(driver.result(reference))
    del reference
    assert await is_kept(known)
    threading.Thread(target=result.set_result, args=(b"reply",)).start()
    assert await call == b"reply"
    assert not await is_kept(known)


@pytest.mark.anyio
@pytest.mark.parametrize("is_abandoned", [False, True])
async def test_references_are_kept_until_the_driver_has_left(joined, is_abandoned):
    """Ray kills a process that drops a reference while it leaves."""
    driver, reference = ray_control.Driver(), Reference()
    result, known = reference.future(), weakref.ref(reference)
    call = asyncio.create_task(driver.result(reference))
    del reference
    await asyncio.sleep(0)
    if is_abandoned:
        call.cancel()
        await asyncio.wait({call})
    async with driver.detached():
        assert call.done()
        result.set_exception(ConnectionError("lost"))
        assert await is_kept(known)
        driver.forget_pending()
        assert not await is_kept(known)
    if not is_abandoned:
        with pytest.raises(ConnectionError, match="rejoined"):
            await call
    await asyncio.wait_for(driver.wait_until_joined(), HANG_S)

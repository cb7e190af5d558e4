"""How the router's process joins Ray and leaves it: one thread at a time."""

import threading

import pytest
import ray

from router.fleet import ray_control

HANG_S = 60.0


class SlowRay:
    """A Ray whose `init` blocks until released, and which records its calls."""

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

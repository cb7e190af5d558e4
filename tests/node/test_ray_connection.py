"""Joining a Ray cluster that is still starting."""

import socket
import time

import pytest

from fabric.errors import FatalError
from node import ray_connection


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_join_is_retried_when_ray_times_out(address, monkeypatch):
    monkeypatch.setattr(ray_connection, "JOIN_POLL_S", 0.0)
    attempts, reports = [], []

    def init(**options):
        attempts.append(options["address"])
        if len(attempts) < 3:
            message = "The current node timed out during startup.\nmore"
            raise Exception(message)  # noqa: TRY002 - as Ray raises it

    monkeypatch.setattr("ray.init", init)

    ray_connection.connect(address, time.monotonic() + 60.0, reports.append)

    assert attempts == [address] * 3
    assert len(reports) == 1, "a wait is reported once"
    assert "timed out during startup" in reports[0]


def test_join_failing_until_deadline_reports_the_reason(address, monkeypatch):
    def init(**_options):
        message = "no tables"
        raise RuntimeError(message)

    monkeypatch.setattr("ray.init", init)

    with pytest.raises(FatalError, match="no tables"):
        ray_connection.connect(address, time.monotonic())


def test_port_without_listener_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reports = []

    with pytest.raises(FatalError, match=f"127.0.0.1:{port}"):
        ray_connection.connect(f"127.0.0.1:{port}", time.monotonic() + 0.3, reports.append)

    assert reports == [f"waiting for Ray at 127.0.0.1:{port}: connection refused"]

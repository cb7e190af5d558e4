"""A real Ray cluster on this machine, for the tests that need one."""

import os
import time
from pathlib import Path

import pytest

from router.supervise.keeper import Keeper
from router.supervise.ray_processes import LocalRay
from tests.support.keys import make_keys

ROOT = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).parent / "standin"
NAMES = ("node-a", "node-b", "node-c")
START_TIMEOUT_S = 180.0


def start_ray(folder: Path, names=NAMES) -> tuple[Keeper, LocalRay]:
    """Start a cluster and wait for all its nodes."""
    make_keys(folder)
    keeper = Keeper(folder / "keeper.log")
    ray = LocalRay(folder, names, keeper)
    ray.environment["PYTHONPATH"] += os.pathsep + str(STANDIN)
    ray.start()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not all(ray.has_started(node) for node in ray.nodes):
        event = keeper.next_event(0.1)
        exited = event is not None and event["event"] == "exited"
        if exited or time.monotonic() > deadline_s:
            logs = [node.log.read_text() for node in ray.nodes if node.log.exists()]
            keeper.close()
            pytest.fail(f"Ray did not start: {event} {logs}")
    return keeper, ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start three Ray nodes, shared by the tests of a file."""
    folder = tmp_path_factory.mktemp("ray")
    keeper, ray = start_ray(folder)
    yield keeper, ray, folder
    ray.stop()
    keeper.close()

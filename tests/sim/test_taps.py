"""No simulated process, alive or dead, reaches the real disk."""

from pathlib import Path

import pytest

from fabric.control.calls import encode_call
from fabric.control.node_calls import DrainNode
from node import drain_flag
from node.store.posix_disk import PosixDisk
from tests.sim import script, scripted


async def drains_while_frozen(world):
    """Send a drain to a frozen node, which handles it only when the run is cleaned up."""
    host = world.nodes["node-b"]
    host.freeze()
    world.loop.spawn(host.process, host._calls.answer(encode_call(DrainNode(draining=True))))


@pytest.mark.parametrize("play", [script.play, scripted.play])
def test_tasks_of_frozen_processes_end_on_simulated_disks(play, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    play(drains_while_frozen)
    assert list(tmp_path.iterdir()) == []


def test_simulated_node_opening_the_real_disk_is_detected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    async def opens(_):
        with pytest.raises(AssertionError, match="the real disk"):
            PosixDisk(Path("simulated"))
        assert drain_flag.PosixDisk is not PosixDisk, "the drain flag uses a simulated disk"

    with pytest.raises(AssertionError, match="a simulated node opens the real disk"):
        scripted.play(opens)
    assert list(tmp_path.iterdir()) == []

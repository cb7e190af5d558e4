"""The time limit of a start, which progress extends."""

import pytest

from router.cli.supervisor import CPU_PROGRESS_S, STALL_S, START_LIMIT_S, StartWatch


class World:
    """A clock and the CPU time of the started processes."""

    def __init__(self, folder):
        self.now_s, self.cpu_s = 100.0, 0.0
        self.watch = StartWatch(folder, 1, now_s=lambda: self.now_s, cpu_s=lambda _: self.cpu_s)

    def pass_time(self, seconds):
        self.now_s += seconds
        return self.watch.expired()


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_start_without_progress_times_out(world):
    assert world.pass_time(STALL_S / 2) is None
    assert "no progress" in world.pass_time(STALL_S / 2 + 1)


def test_growing_log_counts_as_progress(world, tmp_path):
    log = tmp_path / "ray-node-a.log"
    for step in range(8):
        log.write_text("x" * (step + 1))
        assert world.pass_time(STALL_S / 2) is None
    assert "no progress" in world.pass_time(STALL_S + 1)


def test_cpu_time_above_idle_counts_as_progress(world):
    for _ in range(8):
        world.cpu_s += CPU_PROGRESS_S + 1
        assert world.pass_time(STALL_S / 2) is None
    for _ in range(3):
        world.cpu_s += CPU_PROGRESS_S / 4
        reason = world.pass_time(STALL_S / 2)
    assert "no progress" in reason


def test_process_event_counts_as_progress(world):
    for _ in range(4):
        world.watch.note()
        assert world.pass_time(STALL_S / 2) is None


def test_start_has_an_absolute_limit(world):
    while world.now_s < 100.0 + START_LIMIT_S:
        world.watch.note()
        assert world.pass_time(60.0) is None
    assert f"{START_LIMIT_S:g}" in world.pass_time(60.0)

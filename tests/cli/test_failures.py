"""Reasons why processes ended, as Ray and Python print them."""

import pytest

from router.limits import FAILURE_CHARS_MAX, RAYLET_LOG_BYTES_MAX
from router.supervise.failures import (
    describe_status,
    last_words,
    new_errors,
    ray_failure,
    raylet_logs,
)

PRINTED = """2026-11-29 09:48:48,749\tINFO usage_lib.py:448 -- Usage stats collection is disabled.
raylet ended: b'RPC error: Deadline Exceeded'
"""
KILLED = """Some Ray subprocesses exited unexpectedly:

  \x1b[1mraylet\x1b[22m\x1b[26m\x1b[2m [exit code=-9]\x1b[22m\x1b[26m

Remaining processes will be killed.
"""
CHECK = (
    "[2026-11-29 09:49:05,258 C 2071 2071] (raylet) node_manager.cc:3576:  An unexpected system "
    "state has occurred. Please report this issue. Check failed: "
)
LATE = f"{CHECK}statussetor3576.has_value() Timed out waiting for file /ray/s1/metrics_agent_port_7"
FAILED = "The raylet exited immediately because one Ray agent failed, agent_name = dashboard_agent."
FRAMES = "\n*** StackTrace Information ***\nraylet(+0xff770a) ray::operator<<()"


@pytest.mark.parametrize(
    ("printed", "raylet", "reason"),
    [
        (PRINTED, LATE + FRAMES, "its agents took more than 15 s to start"),
        (PRINTED, FAILED, "its dashboard_agent ended"),
        (PRINTED, f"{CHECK}port > 0{FRAMES}", "its raylet ended: port > 0"),
        (PRINTED, "", "raylet ended: b'RPC error: Deadline Exceeded'"),
        (KILLED, "", "its raylet was killed by SIGKILL"),
        ("", "", ""),
    ],
)
def test_reason_of_an_ended_ray_node_is_found(printed, raylet, reason):
    assert ray_failure(printed, raylet) == reason


def test_errors_of_an_earlier_raylet_are_not_read_again(tmp_path):
    logs = tmp_path / "session_latest" / "logs"
    assert new_errors(tmp_path, raylet_logs(tmp_path)) == ""
    logs.mkdir(parents=True)
    (logs / "raylet.err").write_text("earlier")
    before = raylet_logs(tmp_path)
    (logs / "raylet.1.out").write_text("x" * RAYLET_LOG_BYTES_MAX + "later")
    assert new_errors(tmp_path, before).strip().endswith("later")
    assert len(new_errors(tmp_path, before)) <= RAYLET_LOG_BYTES_MAX + 1
    (logs / "raylet.err").write_text("new")  # rotated: shorter than before
    assert "new" in new_errors(tmp_path, before)


def test_long_last_words_are_shortened():
    assert last_words(f"a\n{'b' * 1_000}\n  \n") == "b" * FAILURE_CHARS_MAX


@pytest.mark.parametrize(
    ("status", "words"),
    [(3, "ended with status 3"), (-15, "was killed by SIGTERM"), (-99, "was killed by signal 99")],
)
def test_status_is_described(status, words):
    assert describe_status(status) == words

"""The limit of open files is raised, and garbage collection skips existing objects."""

import gc
import resource
import subprocess
import sys

import pytest

from fabric.hosting.process import (
    OPEN_FILES,
    SWITCH_S,
    keep_pauses_short,
    raise_open_files_limit,
)


def test_open_files_limit_is_raised_up_to_hard_limit():
    program = """
import resource
from fabric.hosting.process import OPEN_FILES, raise_open_files_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_open_files_limit()
soft, after = resource.getrlimit(resource.RLIMIT_NOFILE)
assert after == hard
assert soft == (OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)), soft
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [ValueError, OSError])
@pytest.mark.parametrize(("most", "expected"), [(10_240, 10_240), (6_000, 5_120), (300, 256)])
def test_open_files_limit_falls_back_to_what_the_system_accepts(monkeypatch, error, most, expected):
    """A Mac's hard limit is infinite, but another setting is its real limit."""
    limit = [256, resource.RLIM_INFINITY]

    def setrlimit(_what, wanted):
        if wanted[0] > most:
            raise error
        limit[0] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda _what: tuple(limit))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    raise_open_files_limit()
    assert limit == [expected, resource.RLIM_INFINITY]
    assert expected <= OPEN_FILES


def test_garbage_collector_skips_objects_of_startup():
    before_s = sys.getswitchinterval()
    kept = [[] for _ in range(1_000)]
    try:
        keep_pauses_short()
        assert gc.get_freeze_count() > len(kept)
        assert not any(item is kept for item in gc.get_objects())
        assert sys.getswitchinterval() == SWITCH_S
    finally:
        gc.unfreeze()
        sys.setswitchinterval(before_s)

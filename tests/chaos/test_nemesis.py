"""A fault of the nemesis ends when all processes that depend on its victim have ended."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from router.supervise.processes import identify, is_alive
from tests.chaos.judges import Judges
from tests.chaos.nemesis import Nemesis

VICTIM = "import time; time.sleep(60)"
ACTOR = "import sys, time; sys.stdin.read(); time.sleep(0.5)"  # outlives its victim for a moment


@pytest.mark.parametrize("kind", ["kill raylet", "kill head raylet", "kill gcs"])
def test_fault_ends_after_the_dependent_actor_is_gone(kind):
    """Turns acknowledged until then are excused by the judges."""
    with (
        subprocess.Popen([sys.executable, "-c", VICTIM], stdout=subprocess.PIPE) as victim,
        subprocess.Popen([sys.executable, "-c", ACTOR], stdin=victim.stdout) as actor,
    ):
        found = identify(actor.pid)
        fabric = SimpleNamespace(
            names=("node-a",),
            actor=lambda _: found,
            raylet=lambda _: identify(victim.pid),
            head=lambda: identify(victim.pid),
        )
        Nemesis(fabric, Judges(), 0, None).strike(kind)
        assert victim.wait(60) != 0
        assert not is_alive(found)

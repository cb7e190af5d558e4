"""Headless coding agents, started by `macfabric launch` on a real fabric.

They come from npm's registry (half a gigabyte), so this runs in `make test-all` only, and is
skipped if the registry is unreachable.
"""

import signal

import pytest

from tests.clients.judging import becomes_free
from tests.clients.obedience import ENDLESS, GREETING, SHELL, obeying
from tests.clients.session_programs import CODING_AGENTS

pytestmark = [pytest.mark.nightly, pytest.mark.slow]
REUSED_MIN = 0.8  # of the first prompt of a second session, with the same tools and instructions


@pytest.fixture(scope="module")
def rig(tmp_path_factory):
    with obeying(tmp_path_factory.mktemp("fabric")) as served:
        yield served


@pytest.fixture(params=[agent for agent in CODING_AGENTS if agent.has_tools], ids=str)
def home(request, rig, tmp_path):
    with request.param.home(rig.fabric.url, tmp_path) as agent_home:
        yield agent_home


def test_agent_calls_a_tool_and_its_next_session_is_warm(rig, home):
    assert "It says: " in home.ask(SHELL)
    assert (home.work / "said").read_text() == "fabric-42\n"
    home.has_begun = False
    first = len(rig.model.turns)
    assert GREETING in home.ask("Say hello, please.")

    longest = max(rig.model.turns[first:], key=lambda turn: turn.prompt_tokens)
    assert longest.cached_tokens > REUSED_MIN * longest.prompt_tokens


def test_interrupting_the_agent_frees_the_node(rig, home):
    before = len(rig.model.turns)
    home.interrupt(ENDLESS, lambda: rig.model.is_answering(before), signal.SIGTERM)
    assert becomes_free(rig)
    assert any(turn.sequence.cancelled.is_set() for turn in rig.model.turns[before:])

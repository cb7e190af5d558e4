"""Prefetching an edited agent loads all of it."""

import pytest

from fabric.control.node_calls import AgentView, Done, Flush, PrefetchAgent
from fabric.edit_mode import EditMode
from fabric.ids import AgentId
from tests.node.turn.test_edited_turns import agent_of, continued, start
from tests.support.agent_traffic import words
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

AMORTIZE = EditMode.AMORTIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def test_prefetched_agent_has_all_of_its_edited_memory(tmp_path, model):
    with running(tmp_path, model) as service:
        edited = start(service)
        answer = ask(service, edited, agent="a", edits=AMORTIZE).text
        following = continued(edited, answer, words(41, 12))
        shifts = agent_of(service).cache.shifts
        call(service, Flush(drop_hot=True), Done)
        assert agent_of(service).cache is None
        view = call(service, PrefetchAgent(TENANT, AgentId("a"), 1), AgentView)
        assert view.tiers == ("hot", "disk")
        assert agent_of(service).cache.shifts == shifts != ()
        reply = ask(service, following, agent="a", edits=AMORTIZE)
        assert reply.admitted.cache == "hot"
        assert reply.admitted.cached_tokens > reply.admitted.prompt_tokens - 120

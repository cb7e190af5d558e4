"""A second edit before the disk stored the first."""

import asyncio

import pytest

from fabric.edit_mode import EditMode
from node.store.agent_store import AgentStore
from node.store.posix_disk import DiskError
from tests.node.turn.test_edited_turns import LONG, agent_of, continued, history
from tests.support.agent_traffic import words
from tests.support.services import ask, running
from tests.support.tiny_models import ONE_LAYER, write_model

AMORTIZE = EditMode.AMORTIZE
PUT_IN = words(70, 120)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def refuse(*_):
    message = "full"
    raise DiskError(message)


def on_its_loop(service, change):
    async def run_change():
        change()

    asyncio.run_coroutine_threadsafe(run_change(), service._loop).result(60)


def test_unsaved_first_edit_is_moved_by_the_second(tmp_path, model, monkeypatch):
    first = history(*LONG)
    with running(tmp_path, model) as service:
        answer = ask(service, first, agent="a").text
        edited = continued(history(LONG[0], PUT_IN, *LONG[2:]), answer, words(40, 12))
        publish = AgentStore.publish

        monkeypatch.setattr(AgentStore, "publish", refuse)
        second = ask(service, edited, agent="a", edits=AMORTIZE)
        monkeypatch.setattr(AgentStore, "publish", publish)
        agent = agent_of(service)
        assert agent.layout is not None
        again = [edited[0], {**edited[1], "content": "gone"}, *edited[2:]]
        again = continued(again, second.text, words(42, 12))
        ask(service, again, agent="a", edits=AMORTIZE)
        agent = agent_of(service)
        assert agent.is_durable
        hot = agent.cache.shifts
        layout = service.node.resources.store.layout(agent.saved)
        assert layout.arrangement.shifts == hot


def test_agent_shed_before_saving_reverts_to_its_stored_record(tmp_path, model, monkeypatch):
    """Memory ran short while the disk refused: the agent is as it was before the edit."""
    with running(tmp_path, model) as service:
        answer = ask(service, history(*LONG), agent="a").text
        edited = continued(history(LONG[0], PUT_IN, *LONG[2:]), answer, words(40, 12))
        with monkeypatch.context() as patched:
            patched.setattr(AgentStore, "publish", refuse)
            ask(service, edited, agent="a", edits=AMORTIZE)
            on_its_loop(service, lambda: service.node.resources.table.drop_unsaved(0))
        agent = agent_of(service)
        assert agent.manifest.tokens_count == agent.saved.tokens_count == agent.exact_tokens
        again = ask(service, continued(history(*LONG), answer, words(43, 9)), agent="a")
        assert again.admitted.cached_tokens > agent.saved.tokens_count - 120

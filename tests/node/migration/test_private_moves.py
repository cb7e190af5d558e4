"""Blocks arriving for a private agent serve no other agent there."""

import pytest

from fabric.control.directive_calls import ChangeSettings
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId
from tests.support.copies import copied_offer, withdraw
from tests.support.hibernation import hibernate, resume
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

WORDS = "the cat sat on the mat and the dog sat on the log. " * 30
HELLO = [{"role": "system", "content": WORDS}, {"role": "user", "content": "naïve café"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def cached_tokens(service, agent):
    """Return the number of cached tokens of an agent's first turn."""
    reply = ask(service, HELLO, agent=agent, epoch=1, max_tokens=4, ignore_eos=True)
    return reply.admitted.cached_tokens


def test_blocks_of_a_private_agent_are_hidden_before_the_commit(model, tmp_path):
    with running(tmp_path, model) as here, running(tmp_path, model, "there") as there:
        cached_tokens(here, "alice")
        call(here, ChangeSettings(TENANT, AgentId("alice"), is_private=True), AgentView)
        name, _, copied = copied_offer(here, there, "alice", 1)
        assert copied.blocks_sent > 1
        assert cached_tokens(there, "bob") == 0
        withdraw(there, name, "alice")
        assert cached_tokens(there, "carol") > 0, "blocks that bob saved himself are shared"


def test_blocks_of_an_uncommitted_move_are_hidden(model, tmp_path):
    """The agent may become private while blocks arrive."""
    with running(tmp_path, model) as here, running(tmp_path, model, "there") as there:
        cached_tokens(here, "alice")
        name, _, _ = copied_offer(here, there, "alice", 1)
        call(here, ChangeSettings(TENANT, AgentId("alice"), is_private=True), AgentView)
        assert cached_tokens(there, "bob") == 0
        withdraw(there, name, "alice")
        assert cached_tokens(there, "carol") > 0, "blocks that bob saved himself are shared"


def test_agent_resumed_from_a_private_agents_file_is_private(model, tmp_path):
    with running(tmp_path, model) as here, running(tmp_path, model, "there") as there:
        cached_tokens(here, "alice")
        call(here, ChangeSettings(TENANT, AgentId("alice"), is_private=True), AgentView)
        resume(there, hibernate(here, "alice"), "heir")
        assert there.node.resources.table.get((TENANT, AgentId("heir"))).manifest.is_private
        assert cached_tokens(there, "bob") == 0

"""A running turn of an edited agent moves and continues hot."""

import pytest

from fabric.control.node_calls import CommitMigration, Committed, Offer, SealAgent
from fabric.edit_mode import EditMode
from fabric.turn.generation import CacheTier, HandedOver
from tests.node.engine.test_live_handover import (
    ANSWER_TOKENS,
    Stream,
    agent_at,
    copied_stream,
    move_call,
    move_of,
)
from tests.node.turn.test_edited_turns import start
from tests.support.conversations import read_messages
from tests.support.services import call, running
from tests.support.tiny_models import ONE_LAYER, write_model


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    model = str(write_model(folder / "model", ONE_LAYER))
    with running(folder, model, "node-a") as a, running(folder, model, "node-b") as b:
        yield a, b


def test_edited_agents_answer_continues_hot_on_another_node(nodes):
    a, b = nodes
    undisturbed, name = "calm", "moving"
    prompt_options = {"messages": read_messages(start(a, undisturbed)), "edits": EditMode.AMORTIZE}
    stayed = Stream(a, undisturbed, prompt_options=prompt_options)
    assert stayed.end()[0].amortized_tokens

    start(a, name)
    stream = copied_stream(a, b, name, ANSWER_TOKENS - 40, prompt_options=prompt_options)
    assert b.node.moves.warm_up.size_bytes > 0
    sealed = call(a, move_call(SealAgent, b, name), Offer)
    call(b, CommitMigration(move_of(name), a.node.name, sealed, 2), Committed)
    record, cache = agent_at(a, name).saved, agent_at(b, name).cache
    assert record.edited is not None
    assert cache.tokens_count == record.tokens_count
    assert cache.shifts

    handed = stream.end()[-1]
    assert isinstance(handed, HandedOver)
    on = Stream(b, name, handed.resume, epoch=2, prompt_options=prompt_options)
    assert on.end()[0].cache is CacheTier.HOT
    assert stream.text + on.text == stayed.text

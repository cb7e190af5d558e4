"""SEAL and COMMIT may arrive twice, the second while the first is being carried out."""

import pytest

from fabric.control.calls import ErrorReply, decode_reply, encode_call
from fabric.control.node_calls import (
    AbortMigration,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
    Done,
    Offer,
    OfferMigration,
    SealAgent,
)
from fabric.ids import AgentId, MigrationId, NodeName
from fabric.record.manifest import OwnerState, decode_manifest
from tests.support.incoming import pinned_blocks
from tests.support.services import CALL_S, TENANT, ask, call, running
from tests.support.tiny_models import ONE_LAYER, write_model

KIM = AgentId("kim")
MOVE = MigrationId("migration-1")
A, B = NodeName("node-a"), NodeName("node-b")
MESSAGES = [{"role": "user", "content": "the quick brown fox " * 40}]


@pytest.fixture
def nodes(tmp_path):
    model = write_model(tmp_path / "model", ONE_LAYER)
    with running(tmp_path / "a", model) as a, running(tmp_path / "b", model, "node-b") as b:
        yield a, b


def call_twice(service, message, kind):
    """Send a call twice at once; return both answers."""
    raw = encode_call(message)
    pending = [service.control(raw), service.control(raw)]
    answers = [decode_reply(kind, each.result(CALL_S)) for each in pending]
    assert not [each for each in answers if isinstance(each, ErrorReply)]
    return answers


def test_concurrent_duplicate_calls_get_the_same_answer(nodes):
    source, target = nodes
    epoch = ask(source, MESSAGES, agent="kim").admitted.epoch
    offer = call(source, OfferMigration(TENANT, KIM, epoch, MOVE, B), Offer)
    call(target, CopyBlocks(MOVE, A, offer), Copied)

    sealed, again = call_twice(source, SealAgent(TENANT, KIM, epoch, MOVE, B), Offer)
    first, second = call_twice(target, CommitMigration(MOVE, A, sealed, epoch + 1), Committed)

    assert decode_manifest(sealed.manifest) == decode_manifest(again.manifest)
    assert first.view == second.view
    assert first.view.epoch == epoch + 1
    assert pinned_blocks(target.node) == {}, "a finished move holds nothing"
    more = [*MESSAGES, {"role": "assistant", "content": "x"}, {"role": "user", "content": "y"}]
    assert ask(target, more, agent="kim", epoch=epoch + 1).admitted.epoch == epoch + 1


def test_concurrent_duplicate_aborts_release_lost_blocks_once(nodes, tmp_path):
    source, _ = nodes
    epoch = ask(source, MESSAGES, agent="kim").admitted.epoch
    call(source, OfferMigration(TENANT, KIM, epoch, MOVE, B), Offer)
    call(source, SealAgent(TENANT, KIM, epoch, MOVE, B), Offer)
    for path in (tmp_path / "a").rglob("*.full"):
        path.write_bytes(b"lost")
    agent = source.node.resources.table.get((TENANT, KIM))
    store = source.node.resources.store
    assert store.blocks.verify(agent.saved.refs)
    call_twice(source, AbortMigration(TENANT, KIM, MOVE), Done)
    assert agent.manifest.state is OwnerState.OWNED
    assert agent.manifest.revision == agent.saved.revision
    assert ask(source, MESSAGES, agent="kim").admitted.epoch == epoch

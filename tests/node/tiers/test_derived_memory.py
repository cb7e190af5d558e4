"""An erasure removes rows that others computed from the erased agent's, in every form."""

import asyncio
import errno
from dataclasses import replace

import pytest

from fabric.control.erasure_calls import EraseAgent, KnownErasures, ShareErasures
from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.record.lenders import Lender
from node.store.posix_disk import DiskError
from node.tiers.agent_records import AgentRecords
from tests.node.turn.test_borrowed_spans import (
    ANYWHERE,
    FIRST,
    OTHER,
    SECOND,
    agent_of,
    ask,
    continued,
    on_loop,
    words,
)
from tests.support.copies import fork, replicate
from tests.support.erasures import erase
from tests.support.hibernation import hibernate, resume
from tests.support.services import TENANT, call, migrate, running
from tests.support.tiny_models import ONE_LAYER, write_model

MORE = words(52, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def lend(service, borrower="b"):
    """Have one agent read documents and another borrow them; return the borrower's next turn."""
    ask(service, FIRST, agent="a")
    reply = ask(service, SECOND, agent=borrower, edits=ANYWHERE)
    assert reply.admitted.match == "spans"
    return continued(SECOND, reply.text, MORE)


def check_forgotten(service, next_turn, agent="b", epoch=0):
    """Check that the agent answers as one that never had the memory."""
    assert agent_of(service, agent).saved.edited is None
    reply = ask(service, next_turn, agent=agent, edits=ANYWHERE, epoch=epoch)
    cold = ask(service, next_turn, agent="cold", tenant=OTHER)
    assert reply.admitted.amortized_tokens == 0
    assert reply.text == cold.text


def test_erasure_drops_borrowed_rows_hot_and_on_disk_and_counts_them(tmp_path, model):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        ask(service, words(9, 90), agent="other")
        borrower, other = agent_of(service, "b"), agent_of(service, "other")
        refs, before = set(borrower.saved.refs), other.saved
        tokens = borrower.manifest.tokens_count - borrower.exact_tokens
        receipt = erase(service, "a")
        assert (receipt.derived_agents, receipt.derived_tokens) == (1, tokens)
        assert borrower.cache is None
        assert other.saved is before
        gone = refs - set(borrower.saved.refs)
        assert gone
        assert set(service.node.resources.store.blocks.missing(gone)) == gone
        check_forgotten(service, next_turn)


def test_receipt_counts_rows_dropped_by_a_concurrent_call(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        erasing = service.node.commands.erasing
        call = EraseAgent(TENANT, AgentId("a"), 9, OperationId("op-erase"), 1.0)

        async def erase_and_drop():
            erased = asyncio.create_task(erasing.erase(call))
            await asyncio.sleep(0)
            dropped = await erasing._removal.derived.drop()
            return dropped, await erased

        dropped, receipt = on_loop(service, erase_and_drop())
        assert dropped.agents == 1
        assert (receipt.derived_agents, receipt.derived_tokens) == (1, dropped.tokens)


def test_borrowed_rows_stay_erased_after_a_restart(tmp_path, model):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        erase(service, "a")
    with running(tmp_path, model) as service:
        check_forgotten(service, next_turn)


def test_erasure_drops_rows_borrowed_from_a_borrower(tmp_path, model):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        third = [SECOND[0], *SECOND[2:3], SECOND[1], SECOND[3], SECOND[-1]]
        reply = ask(service, third, agent="c", edits=ANYWHERE)
        assert reply.admitted.match == "spans"
        assert len(agent_of(service, "c").lenders) == 4  # two agents, each with a series of rows
        assert erase(service, "a").derived_agents == 2
        exact = agent_of(service, "c").saved
        assert exact.edited is None
        # Rows that `c` computed of its own text stay, and may be borrowed again.
        again = ask(service, next_turn, agent="b", edits=ANYWHERE)
        assert 0 < again.admitted.amortized_tokens <= exact.tokens_count
        erased = service.node.resources.erased
        lenders = {erased.lender(exact), erased.series(exact)}
        assert set(agent_of(service, "b").lenders) == lenders


def test_erasure_of_an_unrelated_agent_drops_nothing(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        ask(service, words(9, 90), agent="other")
        before = agent_of(service, "b").saved
        assert erase(service, "other").derived_agents == 0
        assert agent_of(service, "b").saved is before


def test_erasure_drops_borrowed_rows_of_forks_replicas_and_moved_agents(tmp_path, model):
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        next_turn = lend(source)
        fork(source, target, "b", "forked")
        replicate(source, target, "b")
        lend(source, borrower="moved")
        migrate(source, target, "moved", 1)
        assert erase(target, "a").derived_agents == 3
        assert erase(source, "a").derived_agents == 2  # `b`, and the record left by the move
        for name in ("forked", "b", "moved"):
            assert agent_of(target, name).saved.edited is None
        check_forgotten(target, next_turn, agent="forked")


def test_erasure_drops_edited_memory_of_copies(tmp_path, model):
    """Removed text is not in the copy's text, but rows after the edit may depend on it."""
    secret = words(77, 30)
    history = [FIRST[0], {"role": "user", "content": secret}, *FIRST[1:]]
    with running(tmp_path, model) as service:
        ask(service, history, agent="p")
        edited = ask(service, FIRST, agent="p", edits=EditMode.AMORTIZE)
        assert edited.admitted.amortized_tokens
        raw = hibernate(service, "p")
        fork(service, service, "p", "forked")
        parent = Lender(service.node.resources.erased.digest(TENANT, "p"), 1)
        assert agent_of(service, "forked").lenders == (parent,)
        assert erase(service, "p").derived_agents == 1
        assert "refused" not in resume(service, raw, "back", epoch=3)
        next_turn = continued(FIRST, edited.text, MORE)
        check_forgotten(service, next_turn, agent="forked")
        check_forgotten(service, next_turn, agent="back", epoch=3)


def test_refused_write_does_not_stop_erasure_for_other_borrowers(tmp_path, model, monkeypatch):
    with running(tmp_path, model) as service:
        lend(service)
        lend(service, borrower="c")
        real, refused = AgentRecords.republish, []

        async def republish(records, agent, record):
            if not refused:
                refused.append(agent.key[1])
                message = "the drive refused"
                raise DiskError(message, errno.EIO)
            await real(records, agent, record)

        monkeypatch.setattr(AgentRecords, "republish", republish)
        with pytest.raises(FabricError):
            erase(service, "a")
        (other,) = {"b", "c"} - set(refused)
        assert agent_of(service, other).saved.edited is None
        assert service.node.health.owes_erasure


def test_hibernated_borrower_is_resumed_without_erased_rows(tmp_path, model):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        raw = hibernate(service, "b")
        erase(service, "a")
        erase(service, "b", epoch=1_001)
        assert "refused" not in resume(service, raw, "back", epoch=3)
        check_forgotten(service, next_turn, agent="back", epoch=3)
        assert not service.node.resources.store.missing(agent_of(service, "back").saved)


def test_node_drops_borrowed_rows_on_shared_tombstones(tmp_path, model):
    with running(tmp_path / "here", model, name="here") as here:
        ask(here, FIRST, agent="a")
        erase(here, "a")
        known = here.node.resources.store, call(here, ShareErasures(()), KnownErasures).erased
    with running(tmp_path / "away", model, name="away") as away:
        next_turn = lend(away)
        call(away, ShareErasures(known[1]), KnownErasures)
        check_forgotten(away, next_turn)


def test_record_without_lender_notes_is_dropped_with_any_erasure(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        ask(service, words(9, 90), agent="other")
        agent = agent_of(service, "b")

        async def remove_lender_notes():
            agent.saved = replace(agent.saved, edited=replace(agent.saved.edited, lenders=None))

        on_loop(service, remove_lender_notes())
        assert agent.lenders == (Lender("", 0),)
        assert erase(service, "other").derived_agents == 1
        assert agent.saved.edited is None
        assert agent.cache is None

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
    grown,
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
    """Let one agent read documents and another borrow them; return what it is asked next."""
    ask(service, FIRST, agent="a")
    reply = ask(service, SECOND, agent=borrower, edits=ANYWHERE)
    assert reply.admitted.match == "spans"
    return grown(SECOND, reply.text, MORE)


def check_forgotten(service, asked, agent="b", epoch=0):
    """Ask as if it still had the memory: it answers as an agent that never had any."""
    assert agent_of(service, agent).saved.edited is None
    reply = ask(service, asked, agent=agent, edits=ANYWHERE, epoch=epoch)
    cold = ask(service, asked, agent="cold", tenant=OTHER)
    assert reply.admitted.amortized_tokens == 0
    assert reply.text == cold.text


def test_hot_memory_and_the_record_go_and_the_receipt_counts_them(tmp_path, model):
    with running(tmp_path, model) as service:
        asked = lend(service)
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
        check_forgotten(service, asked)


def test_the_receipt_counts_what_another_call_drops_meanwhile(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        erasing = service.node.commands.erasing
        call = EraseAgent(TENANT, AgentId("a"), 9, OperationId("op-erase"), 1.0)

        async def both():
            erased = asyncio.create_task(erasing.erase(call))
            await asyncio.sleep(0)
            dropped = await erasing._removal.derived.drop()
            return dropped, await erased

        dropped, receipt = on_loop(service, both())
        assert dropped.agents == 1
        assert (receipt.derived_agents, receipt.derived_tokens) == (1, dropped.tokens)


def test_it_is_gone_after_a_restart(tmp_path, model):
    with running(tmp_path, model) as service:
        asked = lend(service)
        erase(service, "a")
    with running(tmp_path, model) as service:
        check_forgotten(service, asked)


def test_who_borrowed_of_the_borrower_loses_it_too(tmp_path, model):
    with running(tmp_path, model) as service:
        asked = lend(service)
        third = [SECOND[0], *SECOND[2:3], SECOND[1], SECOND[3], SECOND[-1]]
        reply = ask(service, third, agent="c", edits=ANYWHERE)
        assert reply.admitted.match == "spans"
        assert len(agent_of(service, "c").lenders) == 4  # two agents, and a series of rows of each
        assert erase(service, "a").derived_agents == 2
        exact = agent_of(service, "c").saved
        assert exact.edited is None
        # What `c` computed of its own text stays, and may be borrowed again.
        again = ask(service, asked, agent="b", edits=ANYWHERE)
        assert 0 < again.admitted.amortized_tokens <= exact.tokens_count
        erased = service.node.resources.erased
        lenders = {erased.lender(exact), erased.series(exact)}
        assert set(agent_of(service, "b").lenders) == lenders


def test_another_agents_erasure_takes_nothing(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        ask(service, words(9, 90), agent="other")
        before = agent_of(service, "b").saved
        assert erase(service, "other").derived_agents == 0
        assert agent_of(service, "b").saved is before


def test_a_fork_a_replica_and_what_moved_lose_it_too(tmp_path, model):
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        asked = lend(source)
        fork(source, target, "b", "forked")
        replicate(source, target, "b")
        lend(source, borrower="moved")
        migrate(source, target, "moved", 1)
        assert erase(target, "a").derived_agents == 3
        assert erase(source, "a").derived_agents == 2  # `b`, and what the move left
        for name in ("forked", "b", "moved"):
            assert agent_of(target, name).saved.edited is None
        check_forgotten(target, asked, agent="forked")


def test_edited_memory_of_a_fork_and_of_a_file_goes_with_the_agent_it_was_copied_from(
    tmp_path, model
):
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
        asked = grown(FIRST, edited.text, MORE)
        check_forgotten(service, asked, agent="forked")
        check_forgotten(service, asked, agent="back", epoch=3)


def test_one_refused_write_keeps_no_other_agents_derived_memory(tmp_path, model, monkeypatch):
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


def test_a_file_that_is_resumed_later_comes_without_it(tmp_path, model):
    with running(tmp_path, model) as service:
        asked = lend(service)
        raw = hibernate(service, "b")
        erase(service, "a")
        erase(service, "b", epoch=1_001)
        assert "refused" not in resume(service, raw, "back", epoch=3)
        check_forgotten(service, asked, agent="back", epoch=3)
        assert not service.node.resources.store.missing(agent_of(service, "back").saved)


def test_a_node_that_was_away_drops_it_when_it_is_told(tmp_path, model):
    with running(tmp_path / "here", model, name="here") as here:
        ask(here, FIRST, agent="a")
        erase(here, "a")
        known = here.node.resources.store, call(here, ShareErasures(()), KnownErasures).erased
    with running(tmp_path / "away", model, name="away") as away:
        asked = lend(away)
        call(away, ShareErasures(known[1]), KnownErasures)
        check_forgotten(away, asked)


def test_a_record_of_a_version_that_noted_no_lender_goes_with_any_erasure(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        ask(service, words(9, 90), agent="other")
        agent = agent_of(service, "b")

        async def unnote():
            agent.saved = replace(agent.saved, edited=replace(agent.saved.edited, lenders=None))

        on_loop(service, unnote())
        assert agent.lenders == (Lender("", 0),)
        assert erase(service, "other").derived_agents == 1
        assert agent.saved.edited is None
        assert agent.cache is None

"""Borrowed rows are dropped when their lender forgets a message or becomes private."""

import pytest

from fabric.control.directive_calls import ChangeSettings, DirectAgent
from fabric.control.erasure_calls import KnownErasures, ShareErasures
from fabric.control.node_calls import AgentView
from fabric.edit_mode import EditMode
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.record.spans import WantedSpan
from tests.node.tiers.test_derived_memory import check_forgotten, lend
from tests.node.turn.test_borrowed_spans import (
    ANYWHERE,
    FIRST,
    SECOND,
    agent_of,
    ask,
    continued,
    question,
    words,
)
from tests.support.copies import fork
from tests.support.hibernation import hibernate, resume
from tests.support.services import TENANT, call, migrate, running
from tests.support.tiny_models import ONE_LAYER, write_model

LENDER = AgentId("a")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model") / "llama", ONE_LAYER))


def forget(service, number=1, agent=LENDER, mode=EditMode.FORGET):
    operation = OperationId(f"forget-{agent}-{number}")
    span = WantedSpan("message", operation, mode, "cleared", first=number, last=number)
    return call(service, DirectAgent(TENANT, agent, spans=(span,)), AgentView)


def share(service, *, is_private, agent=LENDER):
    return call(service, ChangeSettings(TENANT, agent, is_private=is_private), AgentView)


def revoke_by_forget(service):
    forget(service)


def revoke_by_share(service):
    share(service, is_private=True)


@pytest.fixture(params=[revoke_by_forget, revoke_by_share])
def revoke(request):
    return request.param


def test_revoked_rows_are_dropped_in_memory_and_on_disk(tmp_path, model, revoke):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        refs = set(agent_of(service, "b").saved.refs)
        revoke(service)
        borrower = agent_of(service, "b")
        assert borrower.cache is None
        gone = refs - set(borrower.saved.refs) - set(agent_of(service, "a").saved.refs)
        assert gone
        assert set(service.node.resources.store.blocks.missing(gone)) == gone
        check_forgotten(service, next_turn)


def test_revoked_rows_stay_dropped_after_a_restart(tmp_path, model, revoke):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        raw = hibernate(service, "b")
        revoke(service)
    with running(tmp_path, model) as service:
        assert "refused" not in resume(service, raw, "back", epoch=3)
        check_forgotten(service, next_turn, agent="back", epoch=3)
        check_forgotten(service, next_turn)


def test_amortized_directive_revokes_nothing(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        before = agent_of(service, "b").saved
        forget(service, mode=EditMode.AMORTIZE)
        assert agent_of(service, "b").saved is before


def test_lender_lends_again_only_after_applying_its_directive(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        forget(service)
        reply = ask(service, question((2, 1, 0), words(53, 7)), agent="c", edits=ANYWHERE)
        borrowed = {each.agent for each in agent_of(service, "c").lenders}
        digests = service.node.resources.erased
        assert digests.digest(TENANT, LENDER) not in borrowed
        again = continued(FIRST, "", words(54, 7))
        ask(service, again, agent="a")
        assert agent_of(service, "a").saved.directives[0].is_applied
        fresh = words(200, 70)
        ask(service, [*again, {"role": "user", "content": fresh}], agent="a")
        wanted = [FIRST[0], {"role": "user", "content": fresh}, SECOND[-1]]
        reply = ask(service, wanted, agent="d", edits=ANYWHERE)
        assert reply.admitted.match == "spans"
        lenders = agent_of(service, "d").lenders
        assert digests.digest(TENANT, LENDER) in {each.agent for each in lenders}
        assert not digests.has_erased_lender(TENANT, lenders)


def test_agent_turned_public_lends_again(tmp_path, model):
    with running(tmp_path, model) as service:
        lend(service)
        share(service, is_private=True)
        ask(service, question((1, 0, 2), words(55, 7)), agent="c", edits=ANYWHERE)
        share(service, is_private=False)
        reply = ask(service, question((2, 1, 0), words(56, 7)), agent="d", edits=ANYWHERE)
        assert reply.admitted.match == "spans"
        assert not service.node.resources.erased.has_erased_lender(
            TENANT, agent_of(service, "d").lenders
        )
        series = service.node.resources.erased.series(agent_of(service, "a").saved)
        share(service, is_private=True)
        assert service.node.resources.erased.has_erased_lender(TENANT, (series,))


def test_lender_borrowing_its_own_rows_back_keeps_its_text(tmp_path, model):
    with running(tmp_path, model) as service:
        next_turn = lend(service)
        ask(service, [*FIRST, *next_turn[1:]], agent="a", edits=ANYWHERE)
        ask(service, question((1, 2, 0), words(57, 9)), agent="b", edits=ANYWHERE)
        text = agent_of(service, "a").saved.text
        forget(service)
        assert agent_of(service, "a").saved.text == text


def test_borrower_on_another_node_loses_revoked_rows_on_notice(tmp_path, model, revoke):
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        next_turn = lend(source)
        migrate(source, target, "b", 1)
        revoke(source)
        known = call(source, ShareErasures(()), KnownErasures).erased
        assert len(known) == 1
        call(target, ShareErasures(known), KnownErasures)
        check_forgotten(target, next_turn)


def test_record_with_revoked_rows_is_refused_or_cleaned_on_arrival(tmp_path, model, revoke):
    with (
        running(tmp_path / "a", model, name="node-a") as source,
        running(tmp_path / "b", model, name="node-b") as target,
    ):
        lend(source)
        ask(target, FIRST, agent="x")
        migrate(source, target, "a", 1)
        revoke(target)
        known = call(target, ShareErasures(()), KnownErasures).erased
        with pytest.raises(FabricError, match="was erased") as error:
            fork(source, target, "b", "forked")
        assert error.value.code == "lender_erased"
        call(source, ShareErasures(known), KnownErasures)
        migrate(source, target, "b", 1)
        assert agent_of(target, "b").saved.edited is None

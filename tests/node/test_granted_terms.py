"""A node accepts only the router whose term it granted, also after a restart."""

import asyncio
from functools import partial

import pytest

from fabric.control.calls import CALLS
from fabric.control.node_calls import AgentView, Describe, Done, DrainNode, NodeView, PinAgent
from fabric.control.term_calls import GrantTerm, TermAnswer, TermView
from fabric.errors import FabricError, FatalError
from fabric.ids import AgentId
from fabric.limits import TERM_LEASE_S
from node.runtime.workers import Workers
from node.store import granted_terms
from node.store.granted_terms import GrantedTerms
from tests.support.clocks import ManualClock
from tests.support.services import TENANT, ask, call, running
from tests.support.tiny_models import LLAMA, write_model

ANNA = AgentId("anna")
LONG_S = 60.0


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", LLAMA)


def refusal(work):
    with pytest.raises(FabricError) as refused:
        work()
    return int(refused.value.status), refused.value.code


def grant(service, term, router="one", lease_s=LONG_S, **more):
    return call(service, GrantTerm(term, router, lease_s, **more), TermAnswer)


def test_node_without_a_term_accepts_all_routers(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, "the cat sat", agent=ANNA, max_tokens=1)
        assert call(service, PinAgent(TENANT, ANNA, pinned=True), AgentView).pinned
        view = call(service, Describe(), NodeView)
        assert view.router is None
        assert not (tmp_path / "node-a" / granted_terms.FILE).exists()


def test_turns_and_changes_of_an_old_router_are_refused(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, "the cat sat", agent=ANNA, max_tokens=1)
        assert grant(service, 4, url="http://one").granted
        pin = PinAgent(TENANT, ANNA, pinned=True)
        for term in (None, 3):
            turn = partial(ask, service, "x", agent=ANNA, term=term)
            assert refusal(partial(call, service, pin, AgentView, term)) == (409, "old_router")
            assert refusal(turn) == (409, "old_router")
        assert call(service, pin, AgentView, 4).pinned
        assert ask(service, "the cat sat", agent=ANNA, max_tokens=1, term=4).finished
        assert call(service, Describe(), NodeView).router == TermView(4, "one", "http://one")
        assert not grant(service, 5, "two").granted, "the first router's lease has not expired"


def test_every_changing_call_is_fenced(tmp_path, model):
    fenced = [spec.name for spec in CALLS.values() if not spec.is_open]
    with running(tmp_path, model) as service:
        grant(service, 4)
        assert refusal(lambda: call(service, DrainNode(draining=True), Done)) == (409, "old_router")
    assert len(fenced) >= 20


def test_trial_grant_changes_nothing(tmp_path, model):
    with running(tmp_path, model) as service:
        assert grant(service, 4, is_trial=True).granted
        assert call(service, Describe(), NodeView).router is None
        assert grant(service, 2, "two").granted


def test_restarted_node_remembers_its_granted_term(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, "the cat sat", agent=ANNA, max_tokens=1)
        grant(service, 4)
    pin = PinAgent(TENANT, ANNA, pinned=True)
    with running(tmp_path, model) as service:
        assert call(service, Describe(), NodeView).router == TermView(4, "one")
        assert refusal(lambda: call(service, pin, AgentView, 3)) == (409, "old_router")
        assert not grant(service, 4, "two").granted
        assert grant(service, 4).granted
        assert call(service, pin, AgentView, 4).pinned
        assert grant(service, 4, lease_s=0.0).granted
        assert grant(service, 5, "two").granted


def test_lease_restarts_with_its_node(tmp_path):
    clock, workers = ManualClock(), Workers(1)

    async def life():
        before = GrantedTerms(tmp_path, workers, clock)
        before.recall()
        assert before.view is None
        await before.grant(GrantTerm(4, "one", 3.0))
        clock.now_s += 2.0
        after = GrantedTerms(tmp_path, workers, clock)
        after.recall()
        after.check(4)
        early = await after.grant(GrantTerm(5, "two", 3.0))
        clock.now_s += TERM_LEASE_S
        return early, await after.grant(GrantTerm(5, "two", 3.0))

    early, late = asyncio.run(life())
    workers.close()
    assert (early.granted, early.term, early.left_s) == (False, 4, TERM_LEASE_S)
    assert late.granted


def test_call_with_a_later_term_fences_the_earlier_one(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, "the cat sat", agent=ANNA, max_tokens=1)
        grant(service, 4)
        pin = PinAgent(TENANT, ANNA, pinned=True)
        assert call(service, pin, AgentView, 6).pinned
        assert refusal(lambda: call(service, pin, AgentView, 4)) == (409, "old_router")
    with running(tmp_path, model) as service:
        assert call(service, Describe(), NodeView).router == TermView(6, "")


def test_damaged_terms_file_prevents_the_start(tmp_path, model):
    with running(tmp_path, model) as service:
        grant(service, 4)
    (tmp_path / "node-a" / granted_terms.FILE).write_bytes(b"\xc1")
    with pytest.raises(FatalError, match="stop all routers but one"), running(tmp_path, model):
        pass


def test_term_that_cannot_be_stored_is_not_granted(tmp_path, model, monkeypatch):
    with running(tmp_path, model) as service:

        def refuse(*_):
            message = "full"
            raise FabricError(message)

        monkeypatch.setattr(granted_terms.GrantedTerms, "_write", refuse)
        with pytest.raises(FabricError, match="full"):
            grant(service, 4)
        assert call(service, Describe(), NodeView).router is None
        ask(service, "the cat sat", agent=ANNA, max_tokens=1, term=6)
        pin = PinAgent(TENANT, ANNA, pinned=True)
        assert refusal(lambda: call(service, pin, AgentView, 4)) == (409, "old_router")
        with pytest.raises(FabricError, match="full"):
            grant(service, 6)

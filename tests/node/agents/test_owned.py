"""Every verb on an agent in every state.

The agents are real ones of a real node, brought into each state as the router brings them there.
"""

import asyncio
from types import SimpleNamespace

import pytest

from fabric.control.hibernation_calls import Hibernate
from fabric.control.node_calls import (
    AbortMigration,
    Done,
    Offer,
    OfferMigration,
    PinAgent,
    PrefetchAgent,
    ReleaseAgent,
    SealAgent,
)
from fabric.control.replica_calls import OfferCopy
from fabric.errors import FabricError
from fabric.ids import AgentId, MigrationId, NodeName
from tests.support.erasures import Refusal, erase
from tests.support.services import TENANT, ask, call, running
from tests.support.small_node import SMALL
from tests.support.tiny_models import write_model

EPOCH = 3
OTHER = NodeName("node-b")
EARLIER, MOVE = MigrationId("move-earlier"), MigrationId("move-now")


async def hibernate(node, name, epoch):
    export = node.moves.exports.begin(Hibernate(TENANT, name, epoch))
    try:
        await export.open()
    finally:
        await export.close()


# Each as (node, agent, epoch) -> awaitable. A pin names no epoch.
OWNERS = {
    "move": lambda n, a, e: n.moves.source.offer(OfferMigration(TENANT, a, e, MOVE, OTHER)),
    "seal": lambda n, a, e: n.moves.source.seal(SealAgent(TENANT, a, e, MOVE, OTHER)),
    "copy": lambda n, a, e: n.moves.copy_source.offer(OfferCopy(TENANT, a, e, MOVE, OTHER)),
    "pin": lambda n, a, e: n.commands.pinning.pin(PinAgent(TENANT, a, pinned=True)),
    "prefetch": lambda n, a, e: n.tiers.prefetches.answer(PrefetchAgent(TENANT, a, e)),
    "hibernate": hibernate,
}
# These end an operation; a node without the agent has none to end.
ENDS = {
    "release": lambda n, a, e: n.moves.source.release(ReleaseAgent(TENANT, a, e, MOVE, OTHER)),
    "abort": lambda n, a, e: n.moves.source.take_back(AbortMigration(TENANT, a, MOVE)),
}

ABSENT, REPLICA, STALE = (404, "agent_not_found"), (409, "not_owner"), (421, "stale_epoch")
MOVING, ERASED, DONE = (503, "agent_moving"), (421, "erased"), "done"
# The outcome at the agent's epoch there, and at one below and above it.
REFUSALS = {
    "absent": {0: ABSENT, -1: ABSENT, 1: ABSENT},
    "owned": {0: DONE, -1: STALE, 1: STALE},
    "replica": {0: REPLICA, -1: STALE, 1: STALE},
    "being moved": {0: MOVING, -1: STALE, 1: STALE},
    "being erased": {0: ERASED, -1: ERASED, 1: ERASED},
    "lost to another node": {0: STALE, -1: STALE, 1: STALE},
}


def expected_refusal(verb, state, more):
    return REFUSALS[state][0 if verb == "pin" else more]


def absent(case, name):
    return EPOCH


def owned(case, name):
    ask(case.service, f"{name} says: the cat sat on the mat", agent=name, epoch=EPOCH, max_tokens=2)
    return EPOCH


def replica(case, name):
    owned(case, name)
    call(case.service, ReleaseAgent(TENANT, name, EPOCH + 1, EARLIER, OTHER), Done)
    return EPOCH + 1


def being_moved(case, name):
    owned(case, name)
    call(case.service, SealAgent(TENANT, name, EPOCH, EARLIER, OTHER), Offer)
    call(case.service, AbortMigration(TENANT, name, MigrationId("move-strange")), Done)
    return EPOCH


def being_erased(case, name):
    """Begin an erasure whose record the disk refuses to remove."""
    owned(case, name)
    Refusal(case.monkeypatch, "erase_record")
    with pytest.raises(FabricError, match="the drive refused"):
        erase(case.service, name)
    return EPOCH


def lost(case, name):
    """Lose the agent to another node; the disk refuses to record that."""
    owned(case, name)
    with case.monkeypatch.context() as patched:
        Refusal(patched, "publish")
        with pytest.raises(FabricError, match="the drive refused"):
            call(case.service, ReleaseAgent(TENANT, name, EPOCH + 1, EARLIER, OTHER), Done)
    return EPOCH


STATES = {
    "absent": absent,
    "owned": owned,
    "replica": replica,
    "being moved": being_moved,
    "being erased": being_erased,
    "lost to another node": lost,
}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("node")
    model = str(write_model(folder / "small", SMALL))
    with running(folder, model) as node_service:
        yield node_service


@pytest.fixture
def case(service, monkeypatch):
    return SimpleNamespace(service=service, monkeypatch=monkeypatch)


async def outcome_of(work):
    try:
        await work
    except FabricError as error:
        return int(error.status), error.code
    return DONE


def run(service, work):
    return asyncio.run_coroutine_threadsafe(work, service._loop).result(60)


def agent_id(*words):
    return AgentId("-".join(words).replace(" ", "-"))


@pytest.mark.parametrize("verb", OWNERS)
@pytest.mark.parametrize("state", STATES)
def test_verbs_succeed_only_at_owner_and_current_epoch(case, state, verb):
    node, name = case.service.node, agent_id(verb, state)
    epoch = STATES[state](case, name)
    agent = node.resources.table.get((TENANT, name))
    before, offered = agent and agent.view(), node.resources.transfers.offers.agents()
    for more in (-1, 1, 0):
        outcome = run(case.service, outcome_of(OWNERS[verb](node, name, epoch + more)))
        assert outcome == expected_refusal(verb, state, more), more
        if outcome != DONE:
            assert (agent and agent.view()) == before, "the call changed nothing"
            assert node.resources.transfers.offers.agents() == offered


@pytest.mark.parametrize("verb", ENDS)
@pytest.mark.parametrize("state", STATES)
def test_release_and_abort_are_accepted_in_every_state(case, state, verb):
    node, name = case.service.node, agent_id(verb, state)
    epoch = STATES[state](case, name)
    assert run(case.service, outcome_of(ENDS[verb](node, name, epoch))) == DONE
    agent = node.resources.table.get((TENANT, name))
    assert agent is None or agent.manifest.epoch == epoch


@pytest.mark.parametrize("verb", ["seal", "pin", "hibernate"])
def test_verb_waiting_for_turn_lock_fails_if_agent_is_erased(case, verb):
    node, name = case.service.node, agent_id("waits", verb)
    owned(case, name)

    async def erase_while_waiting():
        agent = node.resources.table.get((TENANT, name))
        async with agent.turn_lock:
            waiting = asyncio.create_task(outcome_of(OWNERS[verb](node, name, EPOCH)))
            await asyncio.sleep(0)  # the verb waits for the turn that holds the lock
            erasing = asyncio.create_task(asyncio.to_thread(erase, case.service, name))
            async with asyncio.timeout(60):
                while not node.resources.erased.floor(TENANT, name):  # noqa: ASYNC110 - on another thread
                    await asyncio.sleep(0.01)
        outcome = await waiting
        return outcome, (await erasing).existed

    assert run(case.service, erase_while_waiting()) == (ERASED, True)
    assert node.resources.table.get((TENANT, name)) is None

"""A node whose agent was taken over stops its turns and acknowledges none of them."""

import asyncio

import pytest

from fabric.control.node_calls import AgentList, Done, ListAgents, ReleaseAgent
from fabric.ids import AgentId, MigrationId, NodeName, OperationId
from fabric.record.manifest import OwnerState
from fabric.turn.generation import Admitted, Failed, Finished, GenerateRequest, Sampling
from tests.support.services import TENANT, ask, call, identity_of, running
from tests.support.tiny_models import LLAMA, write_model

PROMPT = "the cat sat on the mat and the dog sat on the log. " * 8
RELEASE = ReleaseAgent(TENANT, AgentId("alice"), 2, MigrationId("took-it-over"), NodeName("node-b"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model"), LLAMA | {"num_hidden_layers": 2}))


def view(service):
    (only,) = call(service, ListAgents(), AgentList).agents
    return only.view


async def run_long_turn(node, epoch, admitted):
    """Run a long turn; set `admitted` with its first event."""
    request = GenerateRequest(
        OperationId(f"long-turn-{epoch}"), TENANT, identity_of("alice"),
        Sampling(max_tokens=20_000, ignore_eos=True), prompt=PROMPT, epoch=epoch,
    )  # fmt: skip
    events = []
    async for event in node.turns.serve(request):
        events.append(event)
        admitted.set()
    return events


def test_running_turn_of_lost_agent_is_never_acknowledged(tmp_path, model):
    with running(tmp_path, model) as service:
        ask(service, PROMPT, agent="alice")

        async def release_during_turns():
            first, second = asyncio.Event(), asyncio.Event()
            running_turn = asyncio.create_task(run_long_turn(service.node, 1, first))
            await first.wait()
            waiting_turn = asyncio.create_task(run_long_turn(service.node, 1, second))
            released = await asyncio.to_thread(call, service, RELEASE, Done)
            again = await asyncio.to_thread(call, service, RELEASE, Done)
            results = await asyncio.gather(running_turn, waiting_turn, return_exceptions=True)
            return released, again, *results

        work = asyncio.run_coroutine_threadsafe(release_during_turns(), service._loop)
        released, again, ran, waited = work.result(60)
        after, fenced = view(service), service.node.live_turns.fenced_count

    assert isinstance(ran[0], Admitted)
    assert not any(isinstance(event, Finished) for event in ran)
    assert isinstance(ran[-1], Failed)
    assert (ran[-1].code, waited.code) == ("fenced", "stale_epoch")
    assert (released.detail, again.detail) == ("", "nothing to release")
    assert (after.state, after.epoch, after.node) == (OwnerState.REPLICA, 2, "node-b")
    assert fenced == 1
    with running(tmp_path, model) as service:
        assert (view(service).state, view(service).epoch) == (OwnerState.REPLICA, 2)
        next_turn = ask(service, PROMPT, agent="alice", epoch=3)
        assert next_turn.admitted.epoch == 3
        assert next_turn.admitted.cached_tokens > 50, "the replica's memory is reused"

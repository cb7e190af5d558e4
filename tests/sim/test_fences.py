"""A takeover at each moment of a turn, which is not acknowledged if it ends later."""

import asyncio

import pytest

from fabric.control.node_calls import Done, ReleaseAgent
from fabric.errors import StaleEpochError
from fabric.ids import AgentId, MigrationId, NodeName, OperationId
from fabric.turn.generation import (
    Failed,
    Finished,
    GenerateRequest,
    Identity,
    IdentityKind,
    Sampling,
)
from tests.sim.planted import nodes_fence_no_turn
from tests.sim.scripted import TENANT, begin, play
from tests.sim.tokenizer import render

HOST, OTHER = "node-a", NodeName("node-b")
MOMENTS, STEP_S = 20, 0.02
SLOW_DISK_S = 0.1  # so that saving a turn takes many of these moments


def has_turn(agent):
    return agent is not None and agent.turn is not None


def is_saving(agent):
    return has_turn(agent) and agent.turn._is_saving


def take_over_after(since):
    """Return a script that takes agents over, each one moment later after `since` holds."""

    async def script(world):
        host = world.nodes[HOST]
        world.loop.start_worker = world._start_worker
        host.drive.slow_s = SLOW_DISK_S

        async def turn(name):
            request = GenerateRequest(
                operation=OperationId(f"op-{name}-of-hers"),
                tenant=TENANT,
                identity=Identity(IdentityKind.AGENT, name),
                sampling=Sampling(max_tokens=4, ignore_eos=True),
                prompt=render(begin(name)),
                epoch=1,
            )
            last = None
            try:
                async for event in host.node.turns.serve(request):
                    last = event
            except StaleEpochError as error:  # before it was admitted
                return Failed(int(error.status), error.code, error.message)
            return last

        async def release(name):
            message = ReleaseAgent(TENANT, name, 2, MigrationId("m" * 32), OTHER)
            await world.router.services.fleet.link(HOST).call(message, Done)

        ends = []
        for moment in range(MOMENTS):
            name = AgentId(f"agent-{moment}")
            running = world.spawn_on(host, turn(name))
            while not since(host.node.resources.table.get((TENANT, name))):  # noqa: ASYNC110 - simulated
                await asyncio.sleep(0.001)
            await asyncio.sleep(STEP_S * moment)
            await world.run_on_host(world.router, release(name))
            ends.append(await running)
        return ends

    return script


@pytest.mark.parametrize("since", [has_turn, is_saving])
def test_turn_ending_after_a_takeover_is_not_acknowledged(since):
    ends = play(take_over_after(since)).result
    fenced = [end for end in ends if isinstance(end, Failed)]
    assert {end.code for end in fenced} == {"fenced"}
    if since is is_saving:  # it was acknowledged before
        assert {type(end) for end in ends} == {Failed, Finished}


def test_acknowledging_a_turn_after_a_takeover_is_detected():
    with nodes_fence_no_turn(), pytest.raises(AssertionError, match="released at 2"):
        play(take_over_after(is_saving))

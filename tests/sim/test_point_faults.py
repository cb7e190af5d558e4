"""Each write of each flow fails in place once; then every node restarts from its disk."""

import asyncio
from contextlib import suppress
from functools import partial

import pytest

from fabric.control.node_calls import AgentView, PinAgent
from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from tests.sim.disk import PointFault
from tests.sim.model import KINDS
from tests.sim.oracle import answer
from tests.sim.planted import refused_records_are_not_put_back
from tests.sim.scripted import TENANT, begin, play

ALICE = TENANT, AgentId("alice")
RESTARTED_S = 25.0
WRITES_MAX = 40


async def turn(world, messages, home, other):
    return await world.ask("alice", messages)


async def move(world, messages, home, other):
    await world.move("alice", other)


async def fork(world, messages, home, other):
    forks = world.router.services.forks
    work = forks.fork(ALICE, AgentId("fork"), other, OperationId("op-of-the-fork"))
    await world.run_on_host(world.router, work)


async def replicate(world, messages, home, other):
    work = world.router.services.replicas.replicate(ALICE, other, kept=True)
    await world.run_on_host(world.router, work)


async def pin(world, messages, home, other):
    link = world.router.services.fleet.link(home)
    await world.run_on_host(world.router, link.call(PinAgent(*ALICE, pinned=True), AgentView))


async def erase(world, messages, home, other):
    return await world.erase("alice")


async def fail_once(flow, number, world):
    """Run a flow whose `number`-th write fails in place; restart and check what is found."""
    messages = begin("zebra")
    admitted, text, _ = await world.ask("alice", messages)
    messages = [
        *messages,
        {"role": "assistant", "content": text},
        {"role": "user", "content": "And?"},
    ]
    home = admitted.node
    other = next(name for name in world.nodes if name != home)
    fault, done = PointFault(number, is_in_place=True), None
    for host in world.nodes.values():
        host.drive.fault = fault
    with suppress(FabricError):
        done = await flow(world, messages, home, other)
    for host in world.nodes.values():
        host.drive.fault = None
    at_least = admitted.prompt_tokens
    if flow is not erase:  # the agent continues, and must not lose its turns
        later, text, finished = done if flow is turn else await world.ask("alice", messages)
        answered = [*messages, {"role": "assistant", "content": text}]
        messages = [*answered, {"role": "user", "content": "And then?"}]
        at_least = later.prompt_tokens if finished.durable else at_least
    await asyncio.sleep(2.0)
    for host in world.nodes.values():
        host.kill()
    await asyncio.sleep(RESTARTED_S)
    world.invariants.check_quiet()
    if flow is erase and done is not None and not done.unreachable:
        left = [name for host in world.nodes.values() for name in world.words_on(host, "zebra")]
        assert left == [], left
        return fault.name
    admitted, text, _ = await world.ask("alice", messages)
    assert text == answer(messages, world.turn("", messages).sampling, world.kind).text
    if flow is not erase:
        assert admitted.cached_tokens >= at_least - 1, (admitted, at_least)
    return fault.name


def fail_each_write(flow, kind):
    """Play the flow once for each of its writes; return how many there are."""
    for number in range(WRITES_MAX):
        if play(partial(fail_once, flow, number), kind=kind).result is None:
            return number
    pytest.fail(f"{flow.__name__} never runs out of writes")


def test_record_left_by_a_failed_move_is_detected():
    """At its next start the target would revert turns that the source acknowledged since."""
    with refused_records_are_not_put_back(), pytest.raises(AssertionError):
        fail_each_write(move, "full")


@pytest.mark.parametrize("flow", [turn, move, fork, replicate, pin, erase])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[] if name == "full" else [pytest.mark.nightly]) for name in KINDS],
)
def test_every_write_of_a_flow_may_fail_after_its_rename(flow, kind):
    assert fail_each_write(flow, kind) > 0, "the flow writes nothing"

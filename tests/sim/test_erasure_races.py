"""A turn that overtakes an erasure: on its way to a node, and inside the node."""

import asyncio

import pytest

from fabric.control.calls import decode_call
from fabric.control.change_calls import ListChanges
from fabric.control.erasure_calls import EraseAgent, ShareErasures
from fabric.errors import RetryLaterError
from fabric.ids import AgentId, OperationId
from fabric.limits import HEARTBEAT_S
from fabric.record.tombstone import tombstone
from tests.sim.node_host import CLUSTER_KEY
from tests.sim.router_host import ROUTER
from tests.sim.script import refusal_of, retry
from tests.sim.scripted import TENANT, begin, play

ALICE = (TENANT, AgentId("alice"))
ERASED = 70_000


class HeldCalls:
    """Control calls of some kinds that reach a node only once they are released."""

    def __init__(self, host, *kinds):
        self.calls = []
        self._kinds = kinds
        self._receive, host.receive = host.receive, self._take

    def _take(self, raw, reply, fail):
        if isinstance(decode_call(raw)[0], self._kinds):
            self.calls.append((raw, reply, fail))
        else:
            self._receive(raw, reply, fail)

    def release(self):
        self._kinds = ()
        for call in self.calls:
            self._receive(*call)


async def until(holds):
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.01)


async def unreported_turn(world, host, word):
    """Start an agent on a node without any message reaching the router."""
    world.network.cut(host.name, ROUTER)
    asking = asyncio.create_task(world.ask("alice", begin(word)))
    await until(lambda: host.node.resources.table.get(ALICE) is not None)
    await until(lambda: host.node.resources.table.get(ALICE).is_durable)
    asking.cancel()
    await asyncio.wait({asking})
    world.network.cut(host.name, ROUTER, change=-1)
    await asyncio.sleep(HEARTBEAT_S)


async def overtaken_on_the_way(world):
    services, host = world.router.services, world.nodes["node-c"]
    for name in ("node-a", "node-b"):
        await world.run_on_host(world.router, services.drains.start(name))
    lists = HeldCalls(host, ListChanges)
    await unreported_turn(world, host, "zebra")
    assert services.fleet.directory.holdings(ALICE) == ()
    assert world.words_on(host, "zebra")

    erasures = HeldCalls(host, EraseAgent, ShareErasures)
    erasing = asyncio.create_task(world.erase("alice"))
    await until(lambda: erasures.calls)
    error = await refusal_of(world.ask("alice", begin("giraffe")))
    erasures.release()
    lists.release()
    await erasing
    admitted, _, _ = await retry(lambda: world.ask("alice", begin("giraffe")))
    return error, admitted.cached_tokens, world.words_on(host, "zebra")


def test_turn_that_overtakes_an_erasure_restores_nothing():
    """The node has not reported its agent, so the router does not hold the turn back."""
    error, cached_tokens, left = play(overtaken_on_the_way).result
    assert isinstance(error, RetryLaterError)
    assert error.code == "erased"
    assert (cached_tokens, left) == (0, [])


async def erased_under_a_turn(world):
    services, host = world.router.services, world.nodes["node-c"]
    for name in ("node-a", "node-b"):
        await world.run_on_host(world.router, services.drains.start(name))
    await world.ask("alice", begin("zebra"))
    borrowed = host.node.resources.table.get(ALICE).saved.pieces[1].block
    asking = asyncio.create_task(world.ask("bob", begin("giraffe"), max_tokens=300))
    await until(lambda: host.node.resources.store.blocks.references(borrowed) > 1)
    await world.erase("alice")
    kept = world.words_on(host, "zebra")
    _, _, finished = await asking
    return kept, finished.durable, world.words_on(host, "zebra")


def test_blocks_of_an_erased_agent_go_when_the_borrowing_turn_ends():
    """The turn reads the beginning of a block that its own record does not need."""
    kept, is_durable, left = play(erased_under_a_turn).result
    assert len(kept) == 1
    assert is_durable
    assert left == []


def erase(node):
    return node.commands.erasing.erase(EraseAgent(*ALICE, ERASED, OperationId("op-erase"), 1.0))


def take_receipts(node):
    return node.commands.erasing.take(ShareErasures((tombstone(CLUSTER_KEY, *ALICE, ERASED, 1.0),)))


@pytest.mark.parametrize("deliver", [erase, take_receipts])
def test_node_applies_an_erasure_before_it_is_written(deliver):
    """Even while its workers are slow."""

    async def script(world):
        admitted, _, _ = await world.ask("alice", begin("zebra"))
        host = world.nodes[admitted.node]
        world.loop.start_worker = world._start_worker
        host.drive.slow_s = 1.0

        async def arrives():
            erasing = asyncio.create_task(deliver(host.node))
            await asyncio.sleep(0)
            floor = host.node.resources.erased.floor(*ALICE)
            assert host.node.resources.erased.is_all_written is False, (
                "its disk does not hold it yet"
            )
            await erasing
            assert host.node.resources.erased.is_all_written
            return floor

        known = await world.run_on_host(host, arrives())
        assert world.words_on(host, "zebra") == []
        return known

    assert play(script).result == ERASED

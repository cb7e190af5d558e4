"""Empty nodes of a whole fabric receive the prefixes that agents elsewhere share."""

import asyncio

from fabric.ids import AgentId
from fabric.limits import HEARTBEAT_S
from router.limits import PREFIX_SEEDING_RETRY_S
from tests.sim.scripted import TENANT, begin, play

WORD = "lantern"  # in the prompt of all agents


async def start_two_agents(world):
    """Start two agents with one prefix on one node; return that host and the others."""
    admitted, _, _ = await world.ask("alice", begin("zebra"))
    again, _, _ = await world.ask("bob", begin("tapir"))
    assert again.node == admitted.node, "the node with its prefix"
    home = world.nodes[admitted.node]
    return home, [host for host in world.nodes.values() if host is not home]


def has_borrowed(host):
    return host.node is not None and bool(host.node.moves.prefix_target.leases.refs)


async def until_borrowed(hosts):
    async with asyncio.timeout(2 * PREFIX_SEEDING_RETRY_S):
        while not all(map(has_borrowed, hosts)):  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(HEARTBEAT_S)


def test_first_turn_on_an_empty_node_finds_the_shared_prefix():
    async def script(world):
        home, others = await start_two_agents(world)
        await until_borrowed(others)
        home.kill()
        admitted, _, finished = await world.ask("carol", begin("okapi"))
        assert finished is not None
        assert admitted.node != home.name
        return admitted.cached_tokens

    assert play(script).result >= 256


def test_restarted_node_receives_the_shared_prefix_again():
    async def script(world):
        _, (host, _) = await start_two_agents(world)
        await until_borrowed([host])
        host.kill()
        assert not has_borrowed(host)
        await until_borrowed([host])

    play(script)


def test_erasure_removes_borrowed_prefixes_from_all_nodes():
    async def script(world):
        _, others = await start_two_agents(world)
        await until_borrowed(others)
        assert all(world.words_on(host, WORD) for host in others)
        for agent in ("alice", "bob"):
            await world.erase(agent)
        await asyncio.sleep(HEARTBEAT_S)
        return [world.words_on(host, WORD) for host in world.nodes.values()]

    assert not any(play(script).result)


def test_moves_take_precedence_over_prefix_seeding():
    """No spans are requested while a move is under way."""

    async def script(world):
        services = world.router.services
        services.moves._running[TENANT, AgentId("moving")] = None
        _, others = await start_two_agents(world)
        await asyncio.sleep(3 * HEARTBEAT_S)
        assert not any(host.node.moves.prefix_target.leases.refs for host in others)
        services.moves._running.clear()
        await until_borrowed(others)

    play(script)

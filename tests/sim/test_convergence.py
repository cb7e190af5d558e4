"""Within two heartbeats after a fault, routers know the agents, prompts and load of all nodes."""

import asyncio
from unittest import mock

import pytest

from fabric.control.node_calls import ListAgents
from fabric.errors import FabricError
from fabric.limits import HEARTBEAT_S
from node.agents.agent_listing import list_agents
from router.limits import LEASE_S
from tests.sim.network import RETRANSMIT_S
from tests.sim.scripted import begin, play
from tests.sim.test_erasure_races import until

AGENTS = tuple(f"agent-{number}" for number in range(6))
ARRIVES_S = 0.1  # longest round trip of a message here
SETTLED_S = 15.0  # by then nodes have saved all agents, and released those that others own


class Talks:
    """Client of every agent."""

    def __init__(self, world):
        self._world = world
        self._messages = {agent: begin(f"{agent} speaks") for agent in AGENTS}
        self.nodes = {}

    async def say(self, *agents):
        """Take a turn of each agent, all at once, until it is answered."""
        await asyncio.gather(*(self._say(agent) for agent in agents or AGENTS))

    async def _say(self, agent):
        while True:
            try:
                admitted, text, _ = await self._world.ask(agent, self._messages[agent])
            except FabricError:
                await asyncio.sleep(0.2)
            else:
                break
        self.nodes[agent] = admitted.node
        more = {"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}
        self._messages[agent] = [*self._messages[agent], *more]


def node_state(world):
    """Return the agents, sketches and load figures that the nodes have."""
    agents, sketches, load = {}, {}, {}
    for host in world.nodes.values():
        node = host.node
        for item in list_agents(host.name, 1, node.resources.table, ListAgents()).agents:
            place = host.name, item.view.key
            agents[place] = item.view.epoch, item.view.state, item.view.tail
            sketches[place] = tuple(item.sketch)
        view = node.view()
        load[host.name] = view.agents, view.tokens, view.waiting, view.active, 0, 0.0
    return agents, sketches, load


def router_state(router):
    """Return the agents, sketches and load figures that a router knows."""
    fleet = router.services.fleet
    agents, sketches, load = {}, {}, {}
    for key in fleet.directory.all_keys():
        for holding in fleet.directory.unerased_holdings(key):
            tail = holding.view.tail if holding.view else None
            agents[holding.node, key] = holding.epoch, holding.state, tail
    for tenant, (node, agent) in fleet.sketches._places:
        sketches[node, (tenant, agent)] = sketch_of(fleet.sketches, tenant, node, agent)
    for member in fleet.membership.members:
        view, node = member.view, fleet.nodes.find(member.name)
        figures = view.agents, view.tokens, view.waiting, view.active
        load[member.name] = *figures, node.turns, node.promised_s
    return agents, sketches, load


def sketch_of(index, tenant, node, agent):
    """Return an agent's sketch as the index has it."""
    branch, _ = index._places[tenant, (node, agent)]
    pieces = ()
    while branch is not None:
        pieces = (*branch.edge, *pieces)
        branch = branch.parent
    return pieces


async def check_converged(world):
    """Compare all routers with the nodes, two heartbeats from now."""
    await asyncio.sleep(2 * HEARTBEAT_S + ARRIVES_S)
    agents, sketches, load = node_state(world)
    for router in world.router.hosts:
        known_agents, known_sketches, known_load = router_state(router)
        assert known_agents == agents, router.name
        assert known_sketches == sketches, router.name
        assert known_load == load, router.name
    assert {name for name, _ in agents} == set(world.nodes), "every node has agents"
    assert all(sketches.values()), "every agent has a sketch"


async def lose_lists(world, talks):
    """Drop all agent lists while turns change every node."""
    with mock.patch("router.fleet.membership._read_list", side_effect=FabricError("lost")):
        await talks.say()
        await asyncio.sleep(SETTLED_S)


async def restart_a_node(world, talks):
    host = world.nodes[talks.nodes[AGENTS[0]]]
    host.kill()
    await until(lambda: host.is_serving)


async def return_a_node(world, talks):
    """Cut a node off until its agents are served elsewhere, then reconnect it."""
    host = world.nodes[talks.nodes[AGENTS[0]]]
    ways = [
        way
        for router in world.router.hosts
        for way in ((router.name, host.name), (host.name, router.name))
    ]
    for way in ways:
        world.network.cut(*way)
    await asyncio.sleep(LEASE_S + HEARTBEAT_S)
    await talks.say()
    assert talks.nodes[AGENTS[0]] != host.name
    for way in ways:
        world.network.cut(*way, change=-1)
    await asyncio.sleep(RETRANSMIT_S)
    await until(lambda: world.router.services.fleet.is_up(host.name))


async def erase_and_restart_the_router(world, talks):
    await world.erase(AGENTS[1])
    await restart_the_router(world, talks)


async def restart_the_router(world, talks):
    world.router.kill()
    await until(lambda: world.router.is_serving)


async def move_an_agent(world, talks):
    to = next(name for name in world.nodes if name != talks.nodes[AGENTS[0]])
    await world.move(AGENTS[0], to)


FAULTS = (
    lose_lists,
    restart_a_node,
    return_a_node,
    restart_the_router,
    erase_and_restart_the_router,
    move_an_agent,
)


@pytest.mark.parametrize("has_standby", [False, True], ids=["alone", "standby"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_routers_learn_node_contents_within_two_heartbeats(fault, has_standby):
    async def script(world):
        talks = Talks(world)
        for _ in range(2):
            await talks.say()
        for agent, name in zip(AGENTS, (*world.nodes, *world.nodes), strict=True):
            if talks.nodes[agent] != name:
                await world.move(agent, name)
                talks.nodes[agent] = name
        await asyncio.sleep(SETTLED_S)
        await fault(world, talks)
        await check_converged(world)

    play(script, has_standby=has_standby)

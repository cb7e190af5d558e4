"""Fifty power cuts: every agent gets a turn at once; its node joins up to a minute later."""

import asyncio

import pytest

from fabric.errors import FabricError
from tests.sim.scripted import begin, play

CUTS, CUTS_NIGHTLY = 5, 50
AGENTS = [f"agent-{number}" for number in range(6)]
SPEED = 200  # tokens a second: a prompt takes several seconds
FIRST_S, AGAIN_S, HUNG_S = 0.5, 0.2, 2.0


class Client:
    """A client with one agent's conversation, which retries every refusal."""

    def __init__(self, world, agent):
        self._world = world
        self._agent = agent
        self.messages = begin(f"{agent} has a long history. " * 40)
        self.key, self.last, self.cached = world.turn(agent, self.messages).key, None, []

    async def ask(self):
        while True:
            try:
                return await self._ask()
            except FabricError:
                await asyncio.sleep(AGAIN_S)

    async def _ask(self):
        world, last = self._world, self.last
        if world.router.services is None:
            message = "the router starts"
            raise FabricError(message, code="router_gone")
        owner_wait_judge, waiting_turn = world.owner_wait_judge, None
        if last is not None:
            waiting_turn = owner_wait_judge.watch_turn(
                self.key, last.node, last.epoch, self.messages
            )
        admitted, text, _ = await world.ask(self._agent, self.messages)
        owner_wait_judge.check_admitted(waiting_turn, admitted)
        is_warm = last is None or admitted.cached_tokens >= self.cached[-1]
        assert is_warm or admitted.node != last.node, "an owner has lost its cache"
        world.clients.answered_s = world.loop.now_s
        self.last = admitted
        self.cached.append(admitted.prompt_tokens)
        answer, question = {"role": "assistant", "content": text}, {"role": "user", "content": "?"}
        self.messages = [*self.messages, answer, question]


async def restart_again_and_again(world, cuts, counts_nodes):
    world.counts_nodes = counts_nodes
    slow_down(world)
    clients = [Client(world, agent) for agent in AGENTS]
    await asyncio.gather(*(client.ask() for client in clients))
    for number in range(cuts):
        hosts = [*world.nodes.values(), world.router]
        while not all(host.is_serving for host in hosts):  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(1.0)
        world.chaos.cut_power(world.stream(f"cut {number}"))
        await asyncio.sleep(FIRST_S)
        await asyncio.gather(*(client.ask() for client in clients))
    return world.owner_wait_judge


def slow_down(world):
    """Make every node take seconds for a prompt, which it measures after the power cut."""
    for host in world.nodes.values():
        host._tokens_per_s = SPEED
    world.chaos.cut_power(world.stream("first"))


async def hang_after_router_start(world, host):
    """Freeze a node until a new router has served for a while."""
    host.freeze()
    while world.router.services is None:  # noqa: ASYNC110 - simulated time
        await asyncio.sleep(AGAIN_S)
    await asyncio.sleep(HUNG_S)
    host.thaw()


async def restart_the_router_again_and_again(world, cuts):
    slow_down(world)
    clients = [Client(world, agent) for agent in AGENTS]
    await asyncio.gather(*(client.ask() for client in clients))
    owners = {client.key: client.last.node for client in clients}
    names = sorted(set(owners.values()))
    for number in range(cuts):
        while not all(host.is_serving for host in world.nodes.values()):  # noqa: ASYNC110
            await asyncio.sleep(1.0)
        world.router.kill()
        hanging = asyncio.create_task(
            hang_after_router_start(world, world.nodes[names[number % len(names)]])
        )
        await asyncio.sleep(FIRST_S)
        await asyncio.gather(*(client.ask() for client in clients))
        await hanging
    return owners, {client.key: client.last.node for client in clients}


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(CUTS_NIGHTLY, marks=pytest.mark.nightly)])
def test_router_restart_changes_no_owner(cuts):
    world = play(lambda world: restart_the_router_again_and_again(world, cuts))

    before, after = world.result
    print(f"{world.owner_wait_judge.waited_count} turns waited for their owner to report")
    assert world.owner_wait_judge.waited_count > 0
    assert world.owner_wait_judge.elsewhere_count == 0
    assert before == after


@pytest.mark.parametrize("cuts", [CUTS, pytest.param(CUTS_NIGHTLY, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("counts_nodes", [True, False], ids=["counted", "remembered"])
def test_turns_wait_for_their_owner_as_long_as_a_prefill_takes(cuts, counts_nodes):
    world = play(lambda world: restart_again_and_again(world, cuts, counts_nodes))

    owner_wait_judge = world.owner_wait_judge
    print(f"{owner_wait_judge.waited_count} turns waited for their owner", end=", ")
    print(f"{owner_wait_judge.elsewhere_count} were served elsewhere: owners were late")
    assert owner_wait_judge.waited_count > 0

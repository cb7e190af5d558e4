"""A cancelled prompt leaves a cache that is a prefix of many conversations."""

import asyncio

import pytest

from fabric.ids import AgentId, OperationId
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import Identity, IdentityKind, Sampling
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from tests.sim import oracle
from tests.sim.model import KINDS, MODEL
from tests.sim.scripted import FILLER, TENANT, play
from tests.support.conversations import read_messages

ALICE = (TENANT, AgentId("alice"))


def begin(word):
    """Return first messages: a system prompt of several chunks, then a word."""
    return [
        {"role": "system", "content": FILLER * 16},
        {"role": "user", "content": f"{word} {FILLER}"},
    ]


async def cancel_turn(world, messages, least_tokens=BLOCK_TOKENS):
    """Cancel a turn of alice once `least_tokens` of its prompt are computed."""
    asking = asyncio.create_task(world.ask("alice", messages))

    def computed_tokens():
        agents = [agent for node in world.nodes.values() for agent in node.node.resources.table]
        sequences = [a.turn._sequence for a in agents if a.key == ALICE and a.turn is not None]
        return max((s.cache.tokens_count for s in sequences if s is not None), default=0)

    async with asyncio.timeout(60.0):
        while computed_tokens() < least_tokens:  # noqa: ASYNC110 - simulated time
            await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait({asking})
    await asyncio.sleep(2.0)


async def ask_unnamed(world, messages):
    async def ask():
        turn = TurnRequest(
            operation=OperationId("op-unnamed"),
            tenant=TENANT,
            model=MODEL,
            identity=Identity(IdentityKind.CONTENT),
            sampling=Sampling(max_tokens=4),
            prompt=chat_prompt(read_messages(messages)),
        )
        opened = await world.router.services.turns.open(turn)
        async for _ in opened.events():
            pass
        return opened.admitted

    return await world.run_on_host(world.router, ask())


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_agent_with_cancelled_prompt_is_found_by_id_only(is_cancelled):
    """Agents that share its system prompt must not continue its cache."""

    async def script(world):
        if is_cancelled:
            await cancel_turn(world, begin("zebra"))
        else:
            await world.ask("alice", begin("zebra"))
        (record,) = [
            agent.manifest
            for host in world.nodes.values()
            for agent in host.node.resources.table
            if agent.key == ALICE
        ]
        assert record.is_truncated is is_cancelled
        assert record.tokens_count >= BLOCK_TOKENS
        other = await ask_unnamed(world, begin("giraffe"))
        own, _, _ = await world.ask("alice", begin("zebra"))
        return other, own, record.tokens_count

    other, own, count = play(script).result
    assert other.agent != "alice"
    assert own.cached_tokens >= min(count, own.prompt_tokens) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_warm_turn_cancelled_in_first_chunk_keeps_its_cache(kind):
    async def script(world):
        admitted, text, _ = await world.ask("alice", begin("zebra"))
        agent = world.nodes[admitted.node].node.resources.table.get(ALICE)
        known_tokens = agent.cache.tokens_count
        more = [{"role": "assistant", "content": text}, {"role": "user", "content": FILLER}]
        await cancel_turn(world, [*begin("zebra"), *more], known_tokens + 1)
        if agent.cache is not None:
            assert oracle.is_cache_of(agent.cache, agent.manifest.token_ids)
        assert agent.manifest.tokens_count >= known_tokens

    play(script, kind=kind)

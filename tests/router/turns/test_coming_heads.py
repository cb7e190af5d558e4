"""A beginning that a node is about to compute counts for turns that are placed meanwhile."""

import asyncio

import pytest

from fabric.errors import OverloadedError
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.turn.generation import Identity, IdentityKind, Sampling
from fabric.turn.messages import Message, MessageRole
from router.fleet import snapshots
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from router.turns import turns
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
FAST, SLOW = NodeName("node-a"), NodeName("node-b")
TENANT = TenantId("default")
SYSTEM = "You are one of many agents that begin with the same long words. " * 400
COUNT = 8


def request(number, *, kind=IdentityKind.AGENT, text=SYSTEM, tenant=TENANT):
    said = [
        Message(MessageRole.SYSTEM, (text,)),
        Message(MessageRole.USER, (f"I am number {number}.",)),
    ]
    identity = Identity(kind, AgentId(f"agent-{number}") if kind is IdentityKind.AGENT else None)
    return TurnRequest(
        OperationId(f"op-{number}"), tenant, "echo", identity, Sampling(), chat_prompt(said)
    )


def found(made, turn):
    """Return the share of a turn's prompt that each node has, or is about to have."""
    prefixes = snapshots.of_turn(made.fleet, turn).prefixes
    assert all(prefix.agent is None for prefix in prefixes), "no conversation is continued"
    return {prefix.node: prefix.share for prefix in prefixes}


async def sent(made, turn):
    """Send a turn whose node does not answer yet; return its task."""
    count = sum(len(node.requests) for node in made.nodes.values())
    task = asyncio.create_task(made.services.turns.open(turn))
    await until(lambda: sum(len(node.requests) for node in made.nodes.values()) > count)
    return task


async def ended(*tasks):
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_agents_that_arrive_together_go_where_their_beginning_is_computed():
    """Although the other node has nothing to do."""
    async with rig("ab", tended=False) as made:
        made[FAST].view_changes = {"prefill_tokens_per_s": 400.0, "decode_tokens_per_s": 50.0}
        made[SLOW].view_changes = {"prefill_tokens_per_s": 40.0, "decode_tokens_per_s": 5.0}
        await made.fleet.membership.refresh()
        for node in made.nodes.values():
            node.does.hang = True
        tasks = [await sent(made, request(number)) for number in range(COUNT)]
        assert [len(made[name].requests) for name in (FAST, SLOW)] == [COUNT, 0]
        alone_s = request(0).prompt.tokens_estimate / 400
        assert made.fleet.ledger.prefill_s(FAST) < 1.5 * alone_s, "computed once, and the tails"
        await ended(*tasks)
        assert found(made, request(99)) == {}, "none is computed any more"


async def test_what_is_refused_or_private_or_of_others_is_not_found():
    async with rig("a", tended=False) as made:
        made[FAST].does.hang = True
        tasks = [await sent(made, request(1))]
        assert found(made, request(2))[FAST] > 0.9
        assert found(made, request(2, kind=IdentityKind.CONTENT))[FAST] > 0.9
        assert found(made, request(1, kind=IdentityKind.CONTENT))[FAST] == 1.0
        assert found(made, request(2, tenant=TenantId("other"))) == {}
        await ended(*tasks)
        made[FAST].does.hang = False
        made[FAST].does.refuse = OverloadedError("full")
        with pytest.raises(OverloadedError):
            await made.services.turns.open(request(1))
        assert found(made, request(2)) == {}


async def test_what_takes_far_too_long_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(turns, "COMING_S_MIN", 0.0)
    monkeypatch.setattr(turns, "COMING_FACTOR", 0.0)
    async with rig("a", tended=False) as made:
        made[FAST].does.hang = True
        task = await sent(made, request(1))
        await until(lambda: not found(made, request(2)))
        await ended(task)


async def test_an_admitted_prompt_is_found_as_its_agents():
    async with rig("a", tended=False) as made:
        opened = await made.services.turns.open(request(1))
        assert found(made, request(2))[FAST] > 0.9
        assert len(made.fleet.sketches) == 1
        await opened.close()

"""A prefix that a node is about to compute counts for turns that are placed meanwhile."""

import asyncio

import pytest

from fabric.errors import OverloadedError
from fabric.ids import AgentId, NodeName, OperationId, TenantId
from fabric.turn.generation import Identity, IdentityKind, Sampling
from fabric.turn.messages import Message, MessageRole
from router.fleet import snapshots
from router.prompt import chat_prompt
from router.turn_request import TurnRequest
from router.turns import attempts
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio
FAST, SLOW = NodeName("node-a"), NodeName("node-b")
TENANT = TenantId("default")
SYSTEM = "You are one of many agents that begin with the same long words. " * 400
COUNT = 8


def request(number, *, kind=IdentityKind.AGENT, text=SYSTEM, tenant=TENANT):
    messages = [
        Message(MessageRole.SYSTEM, (text,)),
        Message(MessageRole.USER, (f"I am number {number}.",)),
    ]
    identity = Identity(kind, AgentId(f"agent-{number}") if kind is IdentityKind.AGENT else None)
    return TurnRequest(
        OperationId(f"op-{number}"), tenant, "echo", identity, Sampling(), chat_prompt(messages)
    )


def cached_shares(fabric, turn):
    """Return the share of a turn's prompt that each node has, or is about to have."""
    prefixes = snapshots.of_turn(fabric.fleet, turn).prefixes
    assert all(prefix.agent is None for prefix in prefixes), "no conversation is continued"
    return {prefix.node: prefix.share for prefix in prefixes}


async def send(fabric, turn):
    """Send a turn whose node does not answer yet; return its task."""
    count = sum(len(node.requests) for node in fabric.nodes.values())
    task = asyncio.create_task(fabric.services.turns.open(turn))
    await until(lambda: sum(len(node.requests) for node in fabric.nodes.values()) > count)
    return task


async def cancel(*tasks):
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_simultaneous_agents_go_where_their_prefix_is_computed():
    """The agents go there although the other node is idle."""
    async with rig("ab", tended=False) as fabric:
        fabric[FAST].view_changes = {"prefill_tokens_per_s": 400.0, "decode_tokens_per_s": 50.0}
        fabric[SLOW].view_changes = {"prefill_tokens_per_s": 40.0, "decode_tokens_per_s": 5.0}
        await fabric.fleet.membership.refresh()
        for node in fabric.nodes.values():
            node.behaviour.hang = True
        tasks = [await send(fabric, request(number)) for number in range(COUNT)]
        assert [len(fabric[name].requests) for name in (FAST, SLOW)] == [COUNT, 0]
        alone_s = request(0).prompt.tokens_estimate / 400
        assert fabric.fleet.ledger.prefill_s(FAST) < 1.5 * alone_s, "computed once, and the tails"
        await cancel(*tasks)
        assert cached_shares(fabric, request(99)) == {}, "no prefix is being computed"


async def test_pending_prefix_excludes_refused_turns_and_other_tenants():
    async with rig("a", tended=False) as fabric:
        fabric[FAST].behaviour.hang = True
        tasks = [await send(fabric, request(1))]
        assert cached_shares(fabric, request(2))[FAST] > 0.9
        assert cached_shares(fabric, request(2, kind=IdentityKind.CONTENT))[FAST] > 0.9
        assert cached_shares(fabric, request(1, kind=IdentityKind.CONTENT))[FAST] == 1.0
        assert cached_shares(fabric, request(2, tenant=TenantId("other"))) == {}
        await cancel(*tasks)
        fabric[FAST].behaviour.hang = False
        fabric[FAST].behaviour.refuse = OverloadedError("full")
        with pytest.raises(OverloadedError):
            await fabric.services.turns.open(request(1))
        assert cached_shares(fabric, request(2)) == {}


async def test_pending_prefix_expires(monkeypatch):
    monkeypatch.setattr(attempts, "COMING_S_MIN", 0.0)
    monkeypatch.setattr(attempts, "COMING_FACTOR", 0.0)
    async with rig("a", tended=False) as fabric:
        fabric[FAST].behaviour.hang = True
        task = await send(fabric, request(1))
        await until(lambda: not cached_shares(fabric, request(2)))
        await cancel(task)


async def test_admitted_prompt_is_indexed_under_its_agent():
    async with rig("a", tended=False) as fabric:
        opened = await fabric.services.turns.open(request(1))
        assert cached_shares(fabric, request(2))[FAST] > 0.9
        assert len(fabric.fleet.sketches) == 1
        await opened.close()

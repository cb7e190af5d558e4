"""A node's state is changed on its event loop only."""

import asyncio

import pytest

from fabric.ids import AgentId, Fingerprint, MigrationId, NodeName, TenantId
from node.agents.agent_table import AgentTable
from node.migration.incoming import IncomingMove, IncomingMoves
from node.runtime import one_loop
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from tests.node.fake_engine import FakeClock

TENANT = TenantId("default")
MOVE = MigrationId("mig-1")


def table():
    return AgentTable(NodeName("a"), Fingerprint(bytes(32)), FakeClock())


def one_agent():
    return table().create(TENANT, AgentId("known"), None, 1)


# What is changed, and how.
CHANGES = {
    "table": (table, lambda agents: agents.note_change((TENANT, AgentId("new")))),
    "agent": (one_agent, lambda agent: setattr(agent, "is_durable", True)),
    "moves": (
        lambda: IncomingMoves(FakeClock()),
        lambda moves: moves.add_block(MOVE, (TENANT, AgentId("new")), object()),
    ),
    "move": (lambda: IncomingMove(MOVE), lambda move: setattr(move, "at_s", 1.0)),
    "health": (lambda: Health(NodeName("a")), lambda health: setattr(health, "problem", "x")),
    "turns": (lambda: LiveTurns(Health(NodeName("a"))), lambda turns: turns.add(object())),
}


@pytest.mark.parametrize("what", CHANGES)
def test_change_from_another_thread_is_caught(what):
    make, change = CHANGES[what]

    async def change_on_both_threads():
        state = make()
        change(state)
        with pytest.raises(AssertionError, match="off its event loop"):
            await asyncio.to_thread(change, state)

    asyncio.run(change_on_both_threads())


@pytest.mark.parametrize("what", CHANGES)
def test_change_on_another_loop_is_caught(what):
    make, change = CHANGES[what]

    async def change_on_loop(state):
        change(state)

    state = make()
    change(state)  # before any loop runs
    asyncio.run(change_on_loop(state))
    with pytest.raises(AssertionError, match="off its event loop"):
        asyncio.run(change_on_loop(state))


@pytest.mark.parametrize("what", CHANGES)
def test_no_assertion_without_debug_mode(what, monkeypatch):
    monkeypatch.setattr(one_loop._Debug, "is_on", False)
    make, change = CHANGES[what]

    async def change_on_both_threads():
        state = make()
        change(state)
        await asyncio.to_thread(change, state)

    asyncio.run(change_on_both_threads())

"""Agents that share a prompt's first blocks are found by the first block, newest first."""

from dataclasses import replace

import pytest

from fabric.hosting.clock import SystemClock
from fabric.ids import AgentId, Fingerprint, NodeName, TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.record.piece_table import PieceTable
from node.agents.agent_table import AgentTable
from node.limits import ALIKE_AGENTS_MAX
from tests.support.blocks import make_block

TENANT = TenantId("t")
A, B, C = (make_block(number, BLOCK_TOKENS).ref for number in (1, 2, 3))


@pytest.fixture
def table():
    return AgentTable(NodeName("a"), Fingerprint(b"f" * 32), SystemClock())


def add(table, name, blocks, tenant=TENANT):
    agent = table.create(tenant, AgentId(name), None, 1)
    if blocks:
        agent.saved = replace(agent.manifest, pieces=PieceTable().append(blocks))
    table.put(agent)
    return agent


def names(table, agent, blocks):
    return [record.agent for record in table.records_beginning_with(agent, blocks)]


def test_agents_with_all_blocks_are_found_newest_first(table):
    own = add(table, "own", [A, B])
    for name, blocks in (("x", [A, B]), ("y", [A, C]), ("z", [A, B, C]), ("none", [])):
        add(table, name, blocks)
    add(table, "other", [A, B], TenantId("else"))

    assert names(table, own, [A, B]) == ["z", "x"]
    assert names(table, own, [A]) == ["z", "y", "x"]
    assert names(table, own, [C]) == names(table, own, []) == []
    table.put(table.get((TENANT, AgentId("x"))))
    assert names(table, own, [A, B]) == ["x", "z"]


def test_removed_and_changed_agents_are_not_found(table):
    own, gone, changed = (add(table, name, [A]) for name in ("own", "gone", "changed"))
    table.remove(gone.key)
    changed.saved = replace(changed.manifest, pieces=PieceTable().append([B]))
    table.put(changed)

    assert names(table, own, [A]) == []
    assert names(table, own, [B]) == ["changed"]


def test_number_of_compared_agents_is_bounded(table):
    own = add(table, "own", [A])
    for number in range(ALIKE_AGENTS_MAX + 5):
        add(table, f"agent-{number}", [A])
    assert len(names(table, own, [A])) == ALIKE_AGENTS_MAX

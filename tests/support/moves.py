"""Moves of one agent between fake nodes."""

from fabric.record.manifest import OwnerState

LONG = "word " * 1000
KEY = ("default", "alice")


def nodes_of(fabric, answer):
    source = fabric[answer.headers["x-macfabric-node"]]
    target = next(node for node in fabric.nodes.values() if node is not source)
    return source, target


async def begin_turn(fabric, **options):
    return nodes_of(fabric, await fabric.chat(LONG, agent="alice", **options))


async def migrate(fabric, target, agent="alice"):
    return await fabric.http().post(f"/v1/agents/{agent}/migrate", json={"to": target})


def owners(fabric):
    return [
        (node.name, memory.epoch)
        for node in fabric.nodes.values()
        for memory in node.memory.values()
        if memory.key == KEY and memory.state is OwnerState.OWNED
    ]

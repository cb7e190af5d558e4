"""Moves of one agent between fake nodes."""

from fabric.record.manifest import OwnerState

LONG = "word " * 1000
KEY = ("default", "alice")


def nodes_of(made, answer):
    source = made[answer.headers["x-macfabric-node"]]
    target = next(node for node in made.nodes.values() if node is not source)
    return source, target


async def begun(made, **options):
    return nodes_of(made, await made.chat(LONG, agent="alice", **options))


async def migrate(made, target, agent="alice"):
    return await made.http().post(f"/v1/agents/{agent}/migrate", json={"to": target})


def owners(made):
    return [
        (node.name, memory.epoch)
        for node in made.nodes.values()
        for memory in node.memory.values()
        if memory.key == KEY and memory.state is OwnerState.OWNED
    ]

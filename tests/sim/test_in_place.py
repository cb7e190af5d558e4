"""Every publish of every flow fails after its rename, once or permanently; then the power fails.

Whatever the drive holds afterwards: one owner per epoch, right answers, and what was acknowledged
as durable is found again.
"""

import asyncio

import pytest

from fabric.control.calls import decode_reply, encode_call
from fabric.control.hibernation_calls import Hibernate, Resume
from fabric.control.node_calls import AgentView, PinAgent
from fabric.ids import AgentId, OperationId
from fabric.kvcache.hashing import agent_digest
from fabric.limits import HEARTBEAT_S
from fabric.record.manifest import OwnerState, decode_manifest
from fabric.settings import NodeSettings
from tests.sim.node_host import CLUSTER_KEY, TOMBSTONES
from tests.sim.script import (
    TENANT,
    Talk,
    failing_in_place,
    full_for_records,
    play,
    refusal_of,
    retry,
    run_on_host,
)

MIB = 1 << 20
SETTINGS = NodeSettings(hot_bytes=MIB, disk_bytes=64 * MIB)
BOOT_S = 25.0
ALICE, IVAN = AgentId("alice"), AgentId("ivan")


def record(agent):
    return f"manifests/{agent_digest(CLUSTER_KEY, TENANT, agent)}.mf"


def tombstone(agent):
    return f"{TOMBSTONES}agents/{agent_digest(CLUSTER_KEY, TENANT, agent)}"


class Case:
    """Alice, owned by `source` after two turns, and the nodes that may receive her."""

    def __init__(self, world):
        self.world = world
        self.alice = Talk(world, ALICE, "you are alice " * 20)
        self.erased = None

    async def begin(self):
        await self.alice.say("one")
        assert await self.alice.say("two")
        self.source = self.alice.last.node
        self.target, self.third = sorted(self.world.nodes.keys() - {self.source})

    @property
    def services(self):
        return self.world.router.services

    async def move(self, to):
        return await retry(lambda: self.services.moves.migrate(TENANT, ALICE, to))


async def save(case):
    assert not await case.alice.say("three")


async def first_save(case):
    await refusal_of(Talk(case.world, IVAN, "you are ivan " * 20).say("one"))


async def move(case):
    await refusal_of(case.services.moves.migrate(TENANT, ALICE, case.target))


async def move_back(case):
    """Migrate Alice to a target whose disk refuses the commit."""
    with full_for_records(case.world.nodes[case.target].drive):
        error = await refusal_of(case.services.moves.migrate(TENANT, ALICE, case.target))
    assert error.status == 507


async def move_live(case):
    talking = asyncio.create_task(case.alice.say("a long one", max_tokens=120))
    await asyncio.sleep(1.0)
    await move(case)
    await talking


async def drain_away(case):
    """Move Alice off a draining node; her cache must not be lost there."""
    source, durable_tokens = case.world.nodes[case.source], case.alice.durable_tokens
    source.node.health.is_draining = True
    await move(case)
    await asyncio.sleep(2 * HEARTBEAT_S)
    await case.alice.say("while it drains")
    assert case.alice.last.cached_tokens >= durable_tokens - 1, case.alice.last
    source.node.health.is_draining = False


async def fork(case):
    name = OperationId("operation-1")
    await refusal_of(case.services.forks.fork((TENANT, ALICE), IVAN, case.target, name))


async def replicate(case):
    await refusal_of(case.services.replicas.replicate((TENANT, ALICE), case.target, kept=True))


async def replace(case):
    """Import an older file of Alice in place of her record, at her own node."""
    node = case.world.nodes[case.source].node
    epoch = node.resources.table.get((TENANT, ALICE)).manifest.epoch
    export = node.moves.exports.begin(Hibernate(TENANT, ALICE, epoch))

    async def written():
        await export.open()
        raw = b"".join([piece async for piece in export.chunks()])
        await export.close()
        return raw

    raw = await run_on_host(case.world, case.world.nodes[case.source], written())
    before = case.alice.durable_tokens
    assert await case.alice.say("three")

    async def resumed():
        arriving = node.moves.imports.begin(Resume(TENANT, ALICE, epoch + 1, replace=True))
        arriving.feed(raw)
        arriving.finish()
        await arriving.commit()

    error = await refusal_of(run_on_host(case.world, case.world.nodes[case.source], resumed()))
    assert error.status == 507
    case.alice.durable_tokens = before  # an import with `replace` may lose turns


async def pin(case):
    host = case.world.nodes[case.source]
    call = encode_call(PinAgent(TENANT, ALICE, pinned=True))
    decode_reply(AgentView, await run_on_host(case.world, host, host._calls.answer(call)))


async def erase(case):
    """Erase another agent, which must not return."""
    secret = "a secret of ivan " * 20
    assert await Talk(case.world, IVAN, secret).say("one")
    await retry(lambda: case.services.erasures.erase(TENANT, IVAN))
    case.erased = (IVAN, secret.encode())


# The flow, the node whose drive fails, the file, and how many of its publishes succeed first.
FLOWS = {
    "save": (save, "source", record(ALICE), 0),
    "first save": (first_save, "anywhere", record(IVAN), 0),
    "seal": (move, "source", record(ALICE), 0),
    "release": (move, "source", record(ALICE), 1),
    "take back": (move_back, "source", record(ALICE), 1),
    "commit": (move, "target", record(ALICE), 0),
    "seal of a running turn": (move_live, "source", record(ALICE), 0),
    "commit of a running turn": (move_live, "target", record(ALICE), 0),
    "commit of a drained agent": (drain_away, "target", record(ALICE), 0),
    "fork": (fork, "target", record(IVAN), 0),
    "replica": (replicate, "target", record(ALICE), 0),
    "import": (replace, "source", record(ALICE), 1),
    "pin": (pin, "source", record(ALICE), 0),
    "tombstone": (erase, "source", tombstone(IVAN), 0),
}


def stored_claims(world):
    """List the claims of all drives' records: agent, epoch and node."""
    found = []
    for host in world.nodes.values():
        for name, raw in host.drive.files.items():
            if name.startswith("manifests/"):
                record = decode_manifest(raw)
                if record.state is not OwnerState.REPLICA:
                    found.append((record.agent, record.epoch, host.name))
    return found


async def play_flow(world, flow, *, permanent, finds_new):
    case = Case(world)
    await case.begin()
    act, where, file, skip = FLOWS[flow]
    if where == "anywhere":
        # Only this node takes a new agent: the others are draining.
        host = world.nodes[case.third]
        for other in (case.source, case.target):
            world.nodes[other].node.health.is_draining = True
    else:
        host = world.nodes[getattr(case, where)]
    with failing_in_place(host.drive, file, skip, permanent=permanent) as fault:
        await act(case)
        assert fault.hits, "the fault occurred"
        for number in range(3):
            await case.alice.say(f"more {number}")
        host.kill()
        fault.lose_power(finds_new=finds_new)
    await asyncio.sleep(BOOT_S)
    await judge(case)
    # And then a move to an uninvolved node, and a restart of all nodes.
    await case.move(case.third)
    assert await case.alice.say("at the third")
    for each in world.nodes.values():
        each.kill()
    await asyncio.sleep(BOOT_S)
    await judge(case)


async def judge(case):
    world, alice = case.world, case.alice
    durable_tokens = alice.durable_tokens
    await alice.say("and now")
    assert alice.last.cached_tokens >= durable_tokens - 1, alice.last
    assert not case.services.fleet.directory.undecided_agents()
    found = stored_claims(world)
    owned = {(agent, epoch) for agent, epoch, _ in found}
    assert len(owned) == len(found), found
    if case.erased is not None:
        agent, secret = case.erased
        assert agent not in {name for name, _, _ in found}
        for host in world.nodes.values():
            assert not any(secret in raw for raw in host.drive.files.values())


@pytest.mark.parametrize(
    ("permanent", "finds_new"),
    [(False, False), (True, False), (True, True)],
    ids=["once", "permanent, old", "permanent, new"],
)
@pytest.mark.parametrize("flow", FLOWS)
def test_publish_that_fails_after_its_rename_loses_nothing(flow, permanent, finds_new):
    play(lambda world: play_flow(world, flow, permanent=permanent, finds_new=finds_new), SETTINGS)

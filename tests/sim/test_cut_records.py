"""The judge accepts a shortened record where a drive lost a block, and nowhere else."""

from unittest import mock

import pytest

from fabric.control.calls import encode_call
from fabric.control.node_calls import Flush, PinAgent
from fabric.ids import AgentId
from node.store.agent_store import AgentStore
from node.store.block_files import file_name
from node.tiers.record_writer import RecordWriter
from tests.sim.scripted import SAID, SETTINGS, TENANT, Script
from tests.sim.world import run

ALICE = AgentId("alice")
MESSAGES = [
    {"role": "system", "content": "be brief"},  # no block of it: its state is kept nowhere
    {"role": "user", "content": SAID * 2},
]


class Case:
    """An idle agent of three blocks, on disk only."""

    def __init__(self, world, host):
        self.world, self.host = world, host

    @property
    def saved(self):
        return self.host.node.resources.table.get((TENANT, ALICE)).saved

    def lose(self, ref):
        """Damage a block behind the node's back, which finds out."""
        platter, name = self.host.platter, file_name(ref)
        raw = platter.files[name]
        platter.files[name] = raw[:-1] + bytes([raw[-1] ^ 1])
        platter.damaged.add(name)
        platter.hurt.add(name)
        self.host.node.resources.store.blocks.scrub(1 << 40)

    async def call(self, message):
        await self.world.on(self.host, self.host._calls.answer(encode_call(message)))

    async def mend(self):
        """Have the record cut to what is left, as whoever cannot wait for its turn does."""
        await self.call(PinAgent(TENANT, ALICE, pinned=True))


def judged(kind, deed):
    """Let the judge look at what a deed has left; return the record, and what is violated."""
    left = []

    async def live(world):
        admitted, *_ = await world.ask(ALICE, MESSAGES)
        case = Case(world, world.nodes[admitted.node])
        await case.call(Flush(drop_hot=True))
        assert len(case.saved.pieces) == 3
        await deed(case)
        left.append(case.saved)
        world.invariants._check_records()

    world = run(1, lambda seed, loop: Script(seed, loop, live, kind, SETTINGS))
    return left[0], world.violation


async def lose_a_block(case):
    case.lose(case.saved.pieces[1].block)
    await case.mend()


async def lose_the_state(case):
    case.lose(case.saved.states[-1].block)
    await case.mend()


async def lose_a_window(case):
    case.lose(case.saved.windows[-1].block)
    await case.mend()


@pytest.mark.parametrize(
    ("kind", "deed", "blocks_left"),
    [
        ("full", lose_a_block, 1),
        ("window", lose_a_block, 1),
        ("recurrent", lose_a_block, 1),
        ("window", lose_a_window, 3),
        ("recurrent", lose_the_state, 3),
    ],
)
def test_a_record_that_a_drive_made_short_is_no_violation(kind, deed, blocks_left):
    record, violation = judged(kind, deed)
    assert violation is None
    assert len(record.pieces) == blocks_left


async def nothing(case):
    pass


def test_a_record_without_the_state_of_its_end_is_a_violation():
    async def none(*_):
        return ()

    with mock.patch.object(RecordWriter, "_publish_states", none):
        _, violation = judged("recurrent", nothing)
    assert "tokens can be read back" in violation


def test_a_record_without_the_windows_of_its_end_is_a_violation():
    async def none(*_):
        return ()

    with mock.patch.object(RecordWriter, "_publish_windows", none):
        _, violation = judged("window", nothing)
    assert "tokens can be read back" in violation


def test_a_record_that_is_cut_for_nothing_is_a_violation():
    def last(_, record):
        return [record.pieces[-1].block]

    async def mend(case):
        with mock.patch.object(AgentStore, "missing", last):
            await case.mend()

    _, violation = judged("full", mend)
    assert "no drive has lost a block" in violation


def test_a_cut_record_lists_nothing_that_is_lost():
    async def lose_another(case):
        await lose_a_block(case)
        (left,) = case.saved.pieces
        del case.host.platter.files[file_name(left.block)]

    _, violation = judged("full", lose_another)
    assert "only 0 of 256 tokens can be read back" in violation

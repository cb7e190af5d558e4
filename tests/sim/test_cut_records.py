"""The judge accepts a shortened record where a drive lost a block, and nowhere else."""

from unittest import mock

import pytest

from fabric.control.calls import encode_call
from fabric.control.node_calls import Flush, PinAgent
from fabric.ids import AgentId
from node.store.agent_store import AgentStore
from node.store.block_files import file_name
from node.tiers.record_writer import RecordWriter
from tests.sim.scripted import FILLER, SETTINGS, TENANT, Script
from tests.sim.world import run

ALICE = AgentId("alice")
MESSAGES = [
    {"role": "system", "content": "be brief"},  # shorter than a block: its state is not kept
    {"role": "user", "content": FILLER * 2},
]


class Case:
    """An idle agent of three blocks, on disk only."""

    def __init__(self, world, host):
        self.world, self.host = world, host

    @property
    def saved_record(self):
        return self.host.node.resources.table.get((TENANT, ALICE)).saved

    def lose(self, ref):
        """Damage a block, and have the node find that."""
        drive, name = self.host.drive, file_name(ref)
        raw = drive.files[name]
        drive.files[name] = raw[:-1] + bytes([raw[-1] ^ 1])
        drive.damaged.add(name)
        drive.hurt.add(name)
        self.host.node.resources.store.blocks.scrub(1 << 40)

    async def call(self, message):
        await self.world.run_on_host(self.host, self.host._calls.answer(encode_call(message)))

    async def repair(self):
        """Have the record truncated to its remaining blocks, as calls between turns do."""
        await self.call(PinAgent(TENANT, ALICE, pinned=True))


def judge_after(kind, action):
    """Run the judge after an action; return the record and the violation."""
    records = []

    async def live(world):
        admitted, *_ = await world.ask(ALICE, MESSAGES)
        case = Case(world, world.nodes[admitted.node])
        await case.call(Flush(drop_hot=True))
        assert len(case.saved_record.pieces) == 3
        await action(case)
        records.append(case.saved_record)
        world.invariants._check_records()

    world = run(1, lambda seed, loop: Script(seed, loop, live, kind, SETTINGS))
    return records[0], world.violation


async def lose_a_block(case):
    case.lose(case.saved_record.pieces[1].block)
    await case.repair()


async def lose_the_state(case):
    case.lose(case.saved_record.states[-1].block)
    await case.repair()


async def lose_a_window(case):
    case.lose(case.saved_record.windows[-1].block)
    await case.repair()


@pytest.mark.parametrize(
    ("kind", "action", "blocks_left"),
    [
        ("full", lose_a_block, 1),
        ("window", lose_a_block, 1),
        ("recurrent", lose_a_block, 1),
        ("window", lose_a_window, 3),
        ("recurrent", lose_the_state, 3),
    ],
)
def test_record_truncated_by_a_lost_block_is_accepted(kind, action, blocks_left):
    record, violation = judge_after(kind, action)
    assert violation is None
    assert len(record.pieces) == blocks_left


async def keep_all_blocks(case):
    pass


def test_record_without_its_final_state_is_a_violation():
    async def no_refs(*_):
        return ()

    with mock.patch.object(RecordWriter, "_publish_states", no_refs):
        _, violation = judge_after("recurrent", keep_all_blocks)
    assert "tokens can be read back" in violation


def test_record_without_its_final_windows_is_a_violation():
    async def no_refs(*_):
        return ()

    with mock.patch.object(RecordWriter, "_publish_windows", no_refs):
        _, violation = judge_after("window", keep_all_blocks)
    assert "tokens can be read back" in violation


def test_record_truncated_without_a_loss_is_a_violation():
    def last_block(_, record):
        return [record.pieces[-1].block]

    async def repair(case):
        with mock.patch.object(AgentStore, "missing", last_block):
            await case.repair()

    _, violation = judge_after("full", repair)
    assert "no drive has lost a block" in violation


def test_truncated_record_must_not_list_lost_blocks():
    async def lose_two_blocks(case):
        await lose_a_block(case)
        (left,) = case.saved_record.pieces
        del case.host.drive.files[file_name(left.block)]

    _, violation = judge_after("full", lose_two_blocks)
    assert "only 0 of 256 tokens can be read back" in violation

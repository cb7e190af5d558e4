"""A block that arrives in pieces is whole, or detected as wrong, in any order of arrival."""

import itertools
import random

import pytest

from fabric.errors import CorruptDataError
from fabric.ids import BlockHash
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.hashing import PayloadHash, payload_checksum
from node.transfer.work_queue import FetchSlice, FetchWork, PendingBlock

PAYLOAD = random.Random(1).randbytes(1_000)
REF = BlockRef(BlockHash(b"h" * 32), payload_checksum([PAYLOAD]), 256, len(PAYLOAD))


def land(work, block, view, start, end, payload=PAYLOAD):
    """Let one slice arrive, as a stream does."""
    view[start:end] = payload[start:end]
    block.hash_ahead(start, end - start)
    return work.received(FetchSlice(block, start, end - start), end - start)


@pytest.fixture
def arriving():
    block = PendingBlock(REF)
    view = block.place(lambda ref: memoryview(bytearray(ref.payload_bytes)))
    return FetchWork([block]), block, view


@pytest.fixture
def hashed(monkeypatch):
    """Collect how many bytes each step hashed."""
    steps, update = [], PayloadHash.update

    def record_and_update(self, part):
        steps.append(len(part))
        update(self, part)

    monkeypatch.setattr(PayloadHash, "update", record_and_update)
    return steps


def test_bytes_in_order_are_hashed_on_arrival(arriving, hashed):
    cuts = [0, 100, 400, 1_000]
    wholes = [land(*arriving, start, end) for start, end in itertools.pairwise(cuts)]
    assert wholes == [False, False, True]
    assert arriving[1].check() == PAYLOAD
    assert hashed == [100, 300, 600, 0]


def test_bytes_out_of_order_are_hashed_at_the_end(arriving, hashed):
    for start, end in ((600, 1_000), (0, 200), (200, 600)):
        is_whole = land(*arriving, start, end)
    assert is_whole
    assert arriving[1].check() == PAYLOAD
    assert hashed == [200, 400, 400]


@pytest.mark.parametrize("at", [0, 250, 999])
def test_single_wrong_byte_is_detected(arriving, at):
    wrong = bytearray(PAYLOAD)
    wrong[at] ^= 1
    for start, end in ((0, 300), (700, 1_000), (300, 700)):
        land(*arriving, start, end, wrong)
    with pytest.raises(CorruptDataError, match="wrong checksum"):
        arriving[1].check()


def test_corrupt_block_can_be_fetched_again(arriving):
    work, block, _ = arriving
    land(*arriving, 0, 1_000, bytes(1_000))
    with pytest.raises(CorruptDataError):
        block.check()
    assert work.restart(block)
    land(*arriving, 0, 500)
    assert land(*arriving, 500, 1_000)
    assert block.check() == PAYLOAD

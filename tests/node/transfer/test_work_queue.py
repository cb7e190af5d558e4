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


def receive_slice(work, block, view, start, end, payload=PAYLOAD):
    """Receive one slice, as a stream does."""
    view[start:end] = payload[start:end]
    block.hash_ahead(start, end - start)
    return work.count_received(FetchSlice(block, start, end - start), end - start)


@pytest.fixture
def pending_work():
    block = PendingBlock(REF)
    view = block.place(lambda ref: memoryview(bytearray(ref.payload_bytes)))
    return FetchWork([block]), block, view


@pytest.fixture
def hash_steps(monkeypatch):
    """Collect how many bytes each step hashed."""
    steps, update = [], PayloadHash.update

    def record_and_update(self, part):
        steps.append(len(part))
        update(self, part)

    monkeypatch.setattr(PayloadHash, "update", record_and_update)
    return steps


def test_bytes_in_order_are_hashed_on_arrival(pending_work, hash_steps):
    cuts = [0, 100, 400, 1_000]
    wholes = [receive_slice(*pending_work, start, end) for start, end in itertools.pairwise(cuts)]
    assert wholes == [False, False, True]
    assert pending_work[1].check() == PAYLOAD
    assert hash_steps == [100, 300, 600, 0]


def test_bytes_out_of_order_are_hashed_at_the_end(pending_work, hash_steps):
    for start, end in ((600, 1_000), (0, 200), (200, 600)):
        is_whole = receive_slice(*pending_work, start, end)
    assert is_whole
    assert pending_work[1].check() == PAYLOAD
    assert hash_steps == [200, 400, 400]


@pytest.mark.parametrize("at", [0, 250, 999])
def test_single_wrong_byte_is_detected(pending_work, at):
    wrong = bytearray(PAYLOAD)
    wrong[at] ^= 1
    for start, end in ((0, 300), (700, 1_000), (300, 700)):
        receive_slice(*pending_work, start, end, wrong)
    with pytest.raises(CorruptDataError, match="wrong checksum"):
        pending_work[1].check()


def test_corrupt_block_can_be_fetched_again(pending_work):
    work, block, _ = pending_work
    receive_slice(*pending_work, 0, 1_000, bytes(1_000))
    with pytest.raises(CorruptDataError):
        block.check()
    assert work.restart(block)
    receive_slice(*pending_work, 0, 500)
    assert receive_slice(*pending_work, 500, 1_000)
    assert block.check() == PAYLOAD

"""Several reads of one restore are in flight, and the first that fails ends it."""

import threading
import time

import pytest

from node.limits import BLOCK_READERS
from node.tiers.restore import BlockReads, UnreadBlockError, failed_reads

HANG_S = 30.0


@pytest.mark.parametrize("readers_count", [1, 2, BLOCK_READERS])
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_every_block_is_read_once(count, readers_count):
    read = []

    assert BlockReads(count, read.append).run(readers_count) == (count, None)
    assert sorted(read) == list(range(count))


def test_number_of_reads_in_flight_equals_the_readers():
    barrier = threading.Barrier(BLOCK_READERS)

    assert BlockReads(BLOCK_READERS, lambda _: barrier.wait(HANG_S)).run()[1] is None


def test_single_reader_reads_in_order_on_the_calling_thread():
    read = []
    BlockReads(20, lambda index: read.append((index, threading.get_ident()))).run(1)

    assert read == [(index, threading.get_ident()) for index in range(20)]


@pytest.mark.parametrize("readers_count", [1, BLOCK_READERS])
def test_first_failed_read_ends_a_restore(readers_count):
    read = []

    def fail_from_seven(index):
        read.append(index)
        if index >= 7:
            raise ValueError(index)

    count, error = BlockReads(1_000, fail_from_seven).run(readers_count)

    assert (count, error.args) == (7, (7,))
    assert len(read) <= 8 + readers_count


def test_any_exception_on_another_thread_counts_as_a_failed_read():
    """Even SystemExit: that block was not read."""
    asking = threading.get_ident()
    both = threading.Barrier(2)

    def end_elsewhere(index):
        if index < 2:
            both.wait(HANG_S)
        if threading.get_ident() != asking:
            raise SystemExit

    count, error = BlockReads(2, end_elsewhere).run(2)

    assert count < 2
    assert isinstance(error, SystemExit)


def test_failed_restore_waits_for_reads_in_flight():
    ended = []

    def read(index):
        if index == 0:
            raise ValueError
        time.sleep(0.05)
        ended.append(index)

    count, error = BlockReads(BLOCK_READERS, read).run()
    ended_count = len(ended)
    time.sleep(0.1)

    assert (count, type(error)) == (0, ValueError)
    assert len(ended) == ended_count


def test_full_reader_pool_does_not_delay_a_restore():
    block, all_taken = threading.Event(), threading.Barrier(BLOCK_READERS + 1)

    def read_slowly(_):
        all_taken.wait(HANG_S)
        block.wait(HANG_S)

    slow = threading.Thread(target=BlockReads(BLOCK_READERS, read_slowly).run)
    slow.start()
    all_taken.wait(HANG_S)
    try:
        assert BlockReads(50, lambda _: None).run() == (50, None)
    finally:
        block.set()
        slow.join()


@pytest.mark.parametrize("readers_count", [1, BLOCK_READERS])
def test_reads_continue_after_missing_blocks(readers_count):
    misses, read = {0, 7, 8, 41, 99}, set()

    def miss_some(index):
        if index in misses:
            raise UnreadBlockError
        read.add(index)

    assert list(failed_reads(100, miss_some, readers_count)) == sorted(misses)
    assert read == set(range(100)) - misses


def test_other_read_errors_are_raised():
    def fail(index):
        raise (UnreadBlockError if index == 3 else OSError)(index)

    with pytest.raises(OSError, match="0"):
        list(failed_reads(5, fail, 1))

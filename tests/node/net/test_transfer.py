"""Blocks travel between two ends over real sockets, and over broken ones."""

import socket
import threading
import time
from dataclasses import replace

import pytest

from fabric.errors import CorruptDataError, NotFoundError, RejectedError, RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.net.links import LinkKind
from fabric.net.wire import FETCH_PARTS_MAX, HEAD_BYTES
from node.net.connections import Connections
from node.net.listeners import EVERYWHERE
from tests.faults.fault_proxy import Fault, FaultProxy
from tests.support.transfers import (
    BRIEF,
    HASTE,
    Catch,
    await_count,
    closed_port,
    fetch,
    loopback,
    offer,
    serve,
    slow_link,
)

MIB = 1 << 20


def assert_arrived(shelf, refs, catch):
    assert {ref.name: shelf.payload(ref) for ref in refs} == catch.blocks
    assert sorted(catch.allocated) == sorted(catch.blocks)


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_blocks_arrive_over_any_number_of_streams(shelf, server, port, streams):
    sizes = [1, 17, 4096, 300_000, MIB, 3 * MIB + 5, 5 * MIB]
    refs = [shelf.add(size, seed) for seed in range(4) for size in sizes]

    report, catch = fetch([loopback(port)], offer(server, refs), refs, streams=streams)

    assert_arrived(shelf, refs, catch)
    total = sum(ref.payload_bytes for ref in refs)
    assert (report.blocks, report.bytes, report.wire_bytes) == (len(refs), total, total)
    assert (report.streams, report.resumed) == (streams, 0)
    await_count(server, "parts", len(refs))


def test_duplicate_blocks_are_sent_once_and_empty_fetch_needs_no_address(shelf, server, port):
    ref = shelf.add(10_000)
    ticket = offer(server, [ref])

    report, _ = fetch([loopback(port)], ticket, [ref, ref])
    nothing, _ = fetch([], ticket, [])

    assert (report.blocks, nothing.blocks) == (1, 0)
    assert shelf.opened == 1


def test_server_on_all_addresses_lists_the_reachable_ones(shelf):
    server = serve(shelf, SystemClock(), host=EVERYWHERE)
    ref = shelf.add(10_000)
    addresses = server.addresses()

    for address in addresses:
        report, _ = fetch([address], offer(server, [ref]), [ref])
        assert report.blocks == 1
    assert EVERYWHERE not in [address.host for address in addresses]
    assert server.addresses() == addresses
    server.stop()


def test_small_blocks_are_split_over_several_requests(shelf, server, port):
    refs = [shelf.add(700, seed) for seed in range(3 * FETCH_PARTS_MAX + 1)]

    report, catch = fetch([loopback(port)], offer(server, refs), refs)

    assert_arrived(shelf, refs, catch)
    assert report.streams == 1


def test_concurrent_fetches_may_share_a_ticket(shelf, server, port):
    refs = [shelf.add(MIB, seed) for seed in range(6)]
    ticket = offer(server, refs)
    catches = [Catch(), Catch()]
    threads = [
        threading.Thread(target=fetch, args=([loopback(port)], ticket, refs, catch))
        for catch in catches
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    for catch in catches:
        assert_arrived(shelf, refs, catch)


def test_broken_connection_resumes_after_the_last_whole_slice(shelf, server, port):
    refs = [shelf.add(3 * MIB)]
    faults = [Fault(cut_at=MIB + 12_345), Fault(cut_at=900_001)]

    with FaultProxy(("127.0.0.1", port), faults) as proxy:
        report, catch = fetch([loopback(proxy.port)], offer(server, refs), refs, streams=1)

    assert_arrived(shelf, refs, catch)
    assert (report.resumed, proxy.connections) == (1, 3)
    assert report.wire_bytes == report.bytes


def test_fetch_survives_repeated_disconnects_of_all_streams(shelf, server, port):
    refs = [shelf.add(2 * MIB, seed) for seed in range(8)]
    faults = [Fault(cut_at=400_000 + 70_001 * n) for n in range(12)]

    with FaultProxy(("127.0.0.1", port), faults) as proxy:
        report, catch = fetch([loopback(proxy.port)], offer(server, refs), refs)

    assert_arrived(shelf, refs, catch)
    assert report.resumed >= 1
    assert report.wire_bytes == report.bytes


def test_unreachable_address_is_skipped(shelf, server, port):
    refs = [shelf.add(MIB)]
    began_s = time.monotonic()

    timeouts = replace(HASTE, connect_s=60.0)
    addresses = [loopback(closed_port()), loopback(port)]
    report, catch = fetch(addresses, offer(server, refs), refs, timeouts=timeouts)

    assert_arrived(shelf, refs, catch)
    assert report.resumed == 0
    assert time.monotonic() - began_s < timeouts.connect_s


def test_next_link_resumes_a_block_of_a_dead_one(shelf, server, port):
    refs = [shelf.add(4 * MIB, seed) for seed in range(3)]

    with FaultProxy(("127.0.0.1", port), [Fault(cut_at=MIB)]) as dying:
        addresses = [loopback(dying.port), loopback(port)]
        report, catch = fetch(addresses, offer(server, refs), refs, streams=1)

    assert_arrived(shelf, refs, catch)
    assert report.resumed >= 1  # the dying link may be tried once more
    assert sum(use.wire_bytes for use in report.links) == report.bytes


def test_silent_listener_costs_one_handshake_timeout(shelf, server, port):
    refs = [shelf.add(MIB)]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [loopback(silent.getsockname()[1]), loopback(port)]
        report, catch = fetch(addresses, offer(server, refs), refs, timeouts=BRIEF)

    assert_arrived(shelf, refs, catch)
    assert BRIEF.handshake_s <= report.seconds < HASTE.handshake_s


def test_stalled_connection_is_dropped_and_resumed(shelf, server, port):
    refs = [shelf.add(2 * MIB)]

    with FaultProxy(("127.0.0.1", port), [Fault(stall_at=MIB)]) as proxy:
        ticket = offer(server, refs)
        report, catch = fetch([loopback(proxy.port)], ticket, refs, streams=1, timeouts=BRIEF)

    assert_arrived(shelf, refs, catch)
    assert report.resumed == 1
    assert proxy.connections >= 2  # on a busy machine a patience this short may run out again
    assert report.wire_bytes == report.bytes


def test_slow_link_is_not_taken_for_a_dead_one(shelf, server, port):
    refs = [shelf.add(MIB)]
    trickle = Fault(pause_s=0.1, chunk_bytes=64 * 1024)
    timeouts = replace(HASTE, slice_s=1.4)

    with FaultProxy(("127.0.0.1", port), [trickle]) as proxy:
        address = loopback(proxy.port)
        report, catch = fetch([address], offer(server, refs), refs, timeouts=timeouts)

    assert report.seconds > timeouts.slice_s
    assert_arrived(shelf, refs, catch)
    assert (report.resumed, proxy.connections) == (0, 1)


def test_fetch_gives_up_without_a_listener(shelf, server):
    refs = [shelf.add(MIB, seed) for seed in range(8)]
    began_s = time.monotonic()

    with pytest.raises(RetryLaterError, match="mac-a sends nothing"):
        fetch([loopback(closed_port())], offer(server, refs), refs)

    assert time.monotonic() - began_s < HASTE.slice_s


def test_fetch_gives_up_on_dripping_bytes(shelf, server, port):
    refs = [shelf.add(MIB)]
    faults = [Fault(cut_at=1_000)] * 50

    with FaultProxy(("127.0.0.1", port), faults) as proxy:
        with pytest.raises(RetryLaterError):
            fetch([loopback(proxy.port)], offer(server, refs), refs)

        assert proxy.connections <= 2 * HASTE.rounds


def test_fetch_without_an_address_is_refused(shelf, server):
    ref = shelf.add(10)

    with pytest.raises(RetryLaterError, match="no address"):
        fetch([], offer(server, [ref]), [ref])


def test_flipped_bit_costs_one_slice_and_one_connection(shelf, server, port):
    refs = [shelf.add(MIB)]
    connections = Connections()

    with FaultProxy(("127.0.0.1", port), [Fault(flip_at=900_000)]) as proxy:
        address = loopback(proxy.port)
        report, catch = fetch([address], offer(server, refs), refs, connections=connections)
        connections.close()

        assert proxy.connections == 2
    assert_arrived(shelf, refs, catch)
    counts = connections.counts()
    assert (counts["tampered"], counts["failed_over"], counts["resumed"]) == (1, 1, 1)
    assert (counts["blocks"], counts["bytes"]) == (1, MIB)
    assert (report.wire_bytes, report.resumed) == (MIB, 1)


def test_flipped_bit_in_a_frame_head_is_recovered(shelf, server, port):
    refs = [shelf.add(MIB)]

    with FaultProxy(("127.0.0.1", port)) as proxy:
        fetch([loopback(proxy.port)], offer(server, refs), refs)
        challenge_bytes = proxy.from_server[0].index(b"mf", HEAD_BYTES)
    with FaultProxy(("127.0.0.1", port), [Fault(flip_at=challenge_bytes + 3)]) as proxy:
        _, catch = fetch([loopback(proxy.port)], offer(server, refs), refs)

        assert proxy.connections == 2
    assert_arrived(shelf, refs, catch)


def test_block_damaged_on_the_sender_is_refused(shelf, server, port):
    good, bad = shelf.add(1_000), shelf.add(2_000)
    raw = bytearray(shelf.path(bad).read_bytes())
    raw[-7] ^= 1
    shelf.path(bad).write_bytes(raw)
    catch = Catch()

    with pytest.raises(CorruptDataError, match="checksum"):
        fetch([loopback(port)], offer(server, [good, bad]), [good, bad], catch)

    assert bad.name not in catch.blocks


@pytest.mark.parametrize("kind", [LinkKind.LOOPBACK, LinkKind.WIFI])
def test_truncated_file_is_refused(shelf, server, port, kind):
    ref = shelf.add(100_000, noise=False)
    shelf.path(ref).write_bytes(b"short")

    with pytest.raises(CorruptDataError, match="shorter"):
        fetch([loopback(port, kind)], offer(server, [ref]), [ref])


def test_missing_block_is_reported_as_not_found(shelf, server, port):
    kept, gone = shelf.add(1_000), shelf.add(500)
    shelf.path(gone).unlink()
    catch = Catch()

    with pytest.raises(NotFoundError):
        fetch([loopback(port)], offer(server, [kept, gone]), [kept, gone], catch)

    assert list(catch.blocks) == [kept.name]
    assert server.counts()["refused_not_found"] == 1


def test_cancel_ends_a_stalled_fetch_immediately(shelf, server, port):
    ref = shelf.add(2 * MIB)
    cancel = threading.Event()
    timer = threading.Timer(0.2, cancel.set)
    timer.start()

    with FaultProxy(("127.0.0.1", port), [Fault(stall_at=MIB)]) as proxy:
        began_s = time.monotonic()
        with pytest.raises(RetryLaterError) as caught:
            fetch([loopback(proxy.port)], offer(server, [ref]), [ref], cancel=cancel, streams=1)

    assert caught.value.code == "cancelled"
    assert time.monotonic() - began_s < HASTE.slice_s / 4
    timer.join()


@pytest.mark.parametrize("which", ["allocate", "done"])
@pytest.mark.parametrize("error", [OSError("disk full"), MemoryError()])
def test_errors_of_the_callers_callbacks_are_raised_unchanged(shelf, server, port, which, error):
    refs = [shelf.add(MIB, seed) for seed in range(8)]

    def broken(*_):
        raise error

    with pytest.raises(type(error)) as caught:
        fetch([loopback(port)], offer(server, refs), refs, **{which: broken})

    assert caught.value is error


def test_threads_and_connections_end_with_the_fetch(shelf, server, port):
    refs = [shelf.add(5 * MIB, seed) for seed in range(4)]
    before = threading.active_count()

    fetch([loopback(port)], offer(server, refs), refs)

    deadline_s = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_stop_ends_a_running_transfer(shelf):
    server = serve(shelf, SystemClock())
    ref = shelf.add(24 * MIB)  # more than both sockets buffer
    ticket, port = offer(server, [ref]), server.addresses()[0].port

    def stop_and_allocate(ref):
        server.stop()
        return memoryview(bytearray(ref.payload_bytes))

    with pytest.raises(RetryLaterError):
        fetch([loopback(port)], ticket, [ref], allocate=stop_and_allocate)

    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.parametrize("size", [0, 1 << 40])
def test_impossible_lengths_are_refused_before_connecting(shelf, server, port, size):
    ref = shelf.add(10)
    lying = type(ref)(ref.block_hash, ref.checksum, 256, size)

    with pytest.raises(RejectedError, match="length"):
        fetch([loopback(port)], offer(server, [ref]), [lying])


def test_slow_link_is_compressed_if_worthwhile(shelf, server, port):
    soft, hard = shelf.add(4 * MIB + 1, noise=False), shelf.add(2 * MIB)
    refs = [soft, hard]

    report, catch = fetch([slow_link(port)], offer(server, refs), refs)
    fast, _ = fetch([loopback(port, LinkKind.THUNDERBOLT)], offer(server, refs), refs)

    assert_arrived(shelf, refs, catch)
    assert 2 * MIB < report.wire_bytes - hard.payload_bytes < 0.6 * soft.payload_bytes
    assert fast.wire_bytes == fast.bytes


def test_compressed_block_can_be_resumed(shelf, server, port):
    ref = shelf.add(4 * MIB, noise=False)

    with FaultProxy(("127.0.0.1", port), [Fault(cut_at=MIB + 100_000)]) as proxy:
        address, ticket = slow_link(proxy.port), offer(server, [ref])
        report, catch = fetch([address], ticket, [ref], streams=1)

    assert_arrived(shelf, [ref], catch)
    assert report.resumed == 1
    assert report.wire_bytes < 3 * MIB

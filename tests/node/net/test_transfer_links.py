"""One fetch over several links shares the work, and a healthy link takes over from a dead one."""

import threading
from dataclasses import replace

import pytest

from fabric.errors import RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.net.links import LinkKind
from fabric.net.wire import Urgency
from node.limits import TRANSFER_HOLD_S
from node.net.connections import Connections
from node.net.link_reservations import NominalLinks
from node.transfer.urgency_gate import STUCK_S, UrgencyGate
from tests.faults.fault_proxy import Fault, FaultProxy
from tests.support.clocks import ManualClock
from tests.support.transfers import (
    HASTE,
    Catch,
    closed_port,
    fetch,
    loopback,
    offer,
    serve,
    slow_link,
)

MIB = 1 << 20
# Detected soon beside a live link; alone, only after longer than a test may take.
ALERT = replace(HASTE, silence_s=0.4, silence_alone_s=60.0)


class Book(NominalLinks):
    """Nominal links that record their observations and failures."""

    def __init__(self):
        self.observed = []
        self.failures = []

    def observe(self, peer, address, moved_bytes, seconds):
        self.observed.append((address, moved_bytes, seconds))

    def failed(self, peer, address):
        self.failures.append(address)


@pytest.fixture
def connections():
    connections = Connections()
    yield connections
    connections.close()


def paced_link(server, bytes_per_s, faults=1, **changes):
    """Open a link of about this speed: a proxy that pauses between chunks."""
    chunk_bytes = 64 * 1024
    fault = Fault(pause_s=chunk_bytes / bytes_per_s, chunk_bytes=chunk_bytes, **changes)
    return FaultProxy(("127.0.0.1", server.addresses()[0].port), [fault] * faults)


def wire_bytes_by_link(report):
    return [use.wire_bytes for use in report.links]


def test_equal_links_share_large_and_small_blocks(shelf, server, connections):
    refs = [shelf.add(9 * MIB), *(shelf.add(2 * MIB, seed) for seed in range(4))]
    book = Book()
    with paced_link(server, 20 * MIB, 4) as one, paced_link(server, 20 * MIB, 4) as other:
        addresses = [loopback(one.port), loopback(other.port)]
        report, catch = fetch(
            addresses, offer(server, refs), refs, links=book, connections=connections
        )

    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
    assert report.wire_bytes == report.bytes
    assert min(wire_bytes_by_link(report)) > 0.2 * report.bytes
    assert {address for address, _, _ in book.observed} == set(addresses)
    assert sum(count for _, count, _ in book.observed) == report.bytes
    assert book.failures == []


def test_slow_link_helps_without_delaying_the_end(shelf, server, connections):
    refs = [shelf.add(9 * MIB, seed) for seed in range(3)]
    with paced_link(server, 40 * MIB, 4) as fast, paced_link(server, 1 * MIB, 9) as slow:
        addresses = [loopback(slow.port), loopback(fast.port)]
        report, catch = fetch(addresses, offer(server, refs), refs, connections=connections)

    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
    assert wire_bytes_by_link(report)[1] > 2 * wire_bytes_by_link(report)[0]
    assert report.wire_bytes == report.bytes


def test_very_slow_link_is_used_only_as_fallback(shelf, server):
    refs = [shelf.add(4 * MIB)]
    port = server.addresses()[0].port
    with FaultProxy(("127.0.0.1", port), [Fault(cut_at=2 * MIB)] * 9) as fallback:
        slow = slow_link(fallback.port)
        report, _ = fetch([slow, loopback(port)], offer(server, refs), refs)
        assert fallback.connections == 0
        assert report.links[1].wire_bytes == 0

        _, catch = fetch([slow, loopback(closed_port())], offer(server, refs), refs)
        assert fallback.connections > 0
    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}


@pytest.mark.parametrize("stall_at", [0, 300, 3 * MIB])
def test_silently_dead_link_is_detected_by_the_other(shelf, server, connections, stall_at):
    refs = [shelf.add(9 * MIB, seed) for seed in range(3)]
    book = Book()
    with (
        paced_link(server, 40 * MIB, 9, stall_at=stall_at) as dying,
        paced_link(server, 10 * MIB, 9) as slow,
    ):
        addresses = [loopback(dying.port), loopback(slow.port)]
        report, catch = fetch(
            addresses,
            offer(server, refs),
            refs,
            links=book,
            connections=connections,
            timeouts=ALERT,
        )

    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
    assert report.wire_bytes == report.bytes  # no received byte was sent again
    assert addresses[0] in book.failures
    assert connections.counts()["silent"] >= 1


def test_dead_link_is_retried_and_reused(shelf, server):
    refs = [shelf.add(9 * MIB, seed) for seed in range(3)]
    port = server.addresses()[0].port
    faults = [Fault(cut_at=1000)] * 4
    timeouts = replace(HASTE, pause_s=0.05)
    with (
        FaultProxy(("127.0.0.1", port), faults) as flaky,
        paced_link(server, 10 * MIB, 9) as steady,
    ):
        addresses = [loopback(flaky.port), loopback(steady.port)]
        report, catch = fetch(addresses, offer(server, refs), refs, timeouts=timeouts)

    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
    assert report.links[0].failures >= 1
    assert report.links[0].wire_bytes > 0


def test_fetch_over_dead_links_fails_after_bounded_attempts(shelf, server):
    refs = [shelf.add(9 * MIB)]
    book = Book()
    addresses = [loopback(closed_port()), loopback(closed_port(), LinkKind.ETHERNET)]

    with pytest.raises(RetryLaterError, match="mac-a sends nothing over any"):
        fetch(addresses, offer(server, refs), refs, links=book)

    assert set(book.failures) == set(addresses)
    assert len(book.failures) <= 2 * len(addresses) * HASTE.rounds


def test_measured_speed_decides_on_compression(shelf, server):
    ref = shelf.add(4 * MIB, noise=False)
    address = loopback(server.addresses()[0].port, LinkKind.THUNDERBOLT)

    class Measured(NominalLinks):
        def rank(self, peer, addresses):
            return [(address, 1e6) for address in addresses]

    nominal, _ = fetch([address], offer(server, [ref]), [ref])
    measured, catch = fetch([address], offer(server, [ref]), [ref], links=Measured())

    assert nominal.wire_bytes == nominal.bytes
    assert measured.wire_bytes < 0.6 * measured.bytes
    assert list(catch.blocks) == [ref.name]


def test_connections_are_kept_and_reused(shelf, server, connections):
    refs = [shelf.add(MIB, seed) for seed in range(4)]
    address = loopback(server.addresses()[0].port)
    for _ in range(3):
        _, catch = fetch([address], offer(server, refs), refs, connections=connections, streams=1)

    assert catch.blocks == {ref.name: shelf.payload(ref) for ref in refs}
    assert server.counts()["connections"] == 1
    counts = connections.counts()
    assert (counts["dialled"], counts["reused"]) == (1, 2)


def test_dead_kept_connection_is_replaced(shelf, connections):
    server = serve(shelf, SystemClock())
    port = server.addresses()[0].port
    ref = shelf.add(MIB)
    fetch([loopback(port)], offer(server, [ref]), [ref], connections=connections)
    server.stop()

    server = serve(shelf, SystemClock(), port=port)
    report, _ = fetch([loopback(port)], offer(server, [ref]), [ref], connections=connections)
    server.stop()

    assert report.links[0].failures == 0
    counts = connections.counts()
    assert (counts["dialled"], counts.get("reused")) == (2, None)


def test_idle_connections_are_closed_for_new_peers(shelf):
    server = serve(shelf, SystemClock(), connections_max=2)
    ref, address = shelf.add(1_000), server.addresses()[0]
    idle = [Connections() for _ in range(5)]
    for connections in idle:
        _, catch = fetch([address], offer(server, [ref]), [ref], connections=connections)
        assert list(catch.blocks) == [ref.name]

    assert server.counts()["refused_overloaded"] == 3
    for connections in idle:
        connections.close()
    server.stop()


# --- priorities ------------------------------------------------------------------------------


def test_urgent_blocks_go_first_and_others_still_arrive(shelf, server):
    urgent = [shelf.add(6 * MIB, seed) for seed in range(3)]
    idle = [shelf.add(2 * MIB)]
    ticket = offer(server, [*urgent, *idle])
    has_begun, late = threading.Event(), Catch()

    class Signal(Catch):
        def allocate(self, ref):
            has_begun.set()
            return super().allocate(ref)

    with paced_link(server, 10 * MIB, 9) as link:
        arguments = ([loopback(link.port)], ticket, urgent, Signal())
        options = {"urgency": Urgency.MIGRATION_TAIL, "streams": 1}
        thread = threading.Thread(target=fetch, args=arguments, kwargs=options)
        thread.start()
        assert has_begun.wait(60)
        direct = loopback(server.addresses()[0].port)
        fetch([direct], ticket, idle, late, urgency=Urgency.PREFETCH)
        thread.join()

    assert list(late.blocks) == [idle[0].name]
    assert len(arguments[3].blocks) == len(urgent)
    assert server.counts()["slices_held_back"] >= 1


@pytest.mark.parametrize(
    ("mine", "others", "link", "age_s", "waits"),
    [
        (Urgency.PREFETCH, Urgency.FETCH, "a", 0.0, True),
        (Urgency.MIGRATION_COPY, Urgency.MIGRATION_TAIL, "a", 0.0, True),
        (Urgency.FETCH, Urgency.FETCH, "a", 0.0, False),
        (Urgency.MIGRATION_TAIL, Urgency.PREFETCH, "a", 0.0, False),
        (Urgency.PREFETCH, Urgency.FETCH, "b", 0.0, False),
        (Urgency.PREFETCH, Urgency.FETCH, "a", STUCK_S, False),
    ],
)
def test_sender_waits_for_more_urgent_ones_on_its_link(mine, others, link, age_s, waits):
    clock = ManualClock()
    gate = UrgencyGate(clock.monotonic_s)

    with gate.sending(link, others), gate.sending("a", mine) as sender:
        clock.now_s += age_s
        assert gate.before_slice(sender) is waits  # the wait is bounded, so the call returns
    with gate.sending("a", mine) as sender:
        assert gate.before_slice(sender) is False
    assert 0 < TRANSFER_HOLD_S < STUCK_S

"""Real data planes measure each other over several loopback addresses, dead and slow ones too."""

import socket
import sys
import threading
import time
from contextlib import suppress

import pytest

from fabric.errors import RetryLaterError
from fabric.hosting.clock import SystemClock
from fabric.ids import Fingerprint, NodeName
from fabric.limits import KIB, MIB
from fabric.net.links import Address, LinkKind, PeerNode
from node.net import probe
from node.net.interfaces import Listing
from node.net.link_table import LinkTable
from node.net.listeners import EVERYWHERE
from node.net.probe import Caller, Measured
from node.net.prober import LinkProber
from tests.faults.fault_proxy import Fault, FaultProxy
from tests.support.clocks import ManualClock
from tests.support.transfers import (
    FINGERPRINT,
    KEY,
    SOURCE,
    TARGET,
    closed_port,
    fetch,
    impostor,
    loopback,
    offer,
    serve,
)
from tests.support.waiting import wait_until

CALLER = Caller(TARGET, KEY, FINGERPRINT)
many_loopbacks = pytest.mark.skipif(
    sys.platform != "linux", reason="needs 127.0.0.2 and up, which only Linux has by itself"
)


@pytest.fixture
def server(shelf):
    server = serve(shelf, SystemClock(), host=EVERYWHERE)
    yield server
    server.stop()


@pytest.fixture
def prober():
    """Make probers that are stopped at the end."""
    probers = []

    def make(table, measure=CALLER.measure, clock=None, list_now=list, follow=print, **options):
        listing = Listing(list_now)
        clock = clock or SystemClock()
        probers.append(LinkProber(table, measure, clock, follow, listing, 0.02, **options))
        probers[-1].start()
        return probers[-1]

    yield make
    for one in probers:
        one.stop()


def views(table):
    return {(view.host, view.port): view for view in table.views()}


def test_ping_and_probe_use_the_transfer_handshake(port, server):
    pinged = CALLER.measure(SOURCE, loopback(port))
    probed = CALLER.measure(SOURCE, loopback(port), 2 * MIB)

    assert pinged.problem is None
    assert pinged.rtt_s > 0
    assert pinged.moved_bytes == 0
    assert (probed.problem, probed.moved_bytes) == (None, 2 * MIB)
    assert probed.seconds > 0
    assert server.counts()["connections"] == 2


@pytest.mark.parametrize(
    ("caller", "peer", "problem"),
    [
        (Caller(TARGET, b"x" * 32, FINGERPRINT), SOURCE, "bad_key"),
        (Caller(TARGET, KEY, Fingerprint(b"g" * 32)), SOURCE, "fingerprint_mismatch"),
        (CALLER, NodeName("mac-c"), "wrong_node"),
    ],
)
def test_measurement_authenticates_the_peer(port, caller, peer, problem):
    assert caller.measure(peer, loopback(port)).problem == problem


def test_closed_port_hang_up_and_bad_address_are_distinguished():
    assert CALLER.measure(SOURCE, loopback(closed_port())).problem == "refused"
    with impostor(lambda channel, sock: sock.shutdown(socket.SHUT_RDWR)) as address:
        assert CALLER.measure(SOURCE, address).problem == "broken"
    bad = Address("mac.local", 1, LinkKind.ETHERNET)
    assert CALLER.measure(SOURCE, bad).problem == "bad_address"


def test_probe_is_refused_during_a_transfer(port, server, shelf):
    ref = shelf.add(32 * MIB)  # more than the sockets can buffer
    ticket, enough = offer(server, [ref]), threading.Event()

    def fetch_until_enough(address):
        with suppress(RetryLaterError):
            fetch([address], ticket, [ref], cancel=enough, streams=1)

    with FaultProxy(("127.0.0.1", port), [Fault(stall_at=MIB)]) as proxy:
        fetching = threading.Thread(target=fetch_until_enough, args=[loopback(proxy.port)])
        fetching.start()
        wait_until(lambda: proxy.from_server and len(proxy.from_server[0]) >= 64 * KIB)
        busy = CALLER.measure(SOURCE, loopback(port), MIB)
        enough.set()
        fetching.join()
    wait_until(lambda: CALLER.measure(SOURCE, loopback(port), MIB).moved_bytes == MIB)

    assert (busy.problem, busy.moved_bytes, busy.is_probe_unfinished) == (None, 0, True)
    assert busy.rtt_s > 0


def test_probe_of_a_very_slow_link_is_cut_and_measures_it(port, server, monkeypatch):
    monkeypatch.setattr(probe, "PROBE_S", 1.0)
    slow = [Fault(pause_s=0.1, chunk_bytes=8 * KIB)] * 2
    with FaultProxy(("127.0.0.1", port), slow) as proxy:
        address = loopback(proxy.port)
        measured = CALLER.measure(SOURCE, address, MIB)
        table = LinkTable(SystemClock())
        table.set_peers([PeerNode(SOURCE, 1, (address,))])
        table.record_answer(SOURCE, address, measured.rtt_s, "", None)
        table.record_rate(SOURCE, address, measured.moved_bytes, measured.seconds)

    assert measured.problem is None
    assert 0 < measured.moved_bytes < MIB // 4
    assert 0 < views(table)["127.0.0.1", proxy.port].bytes_per_s <= 1.25 * 8 * KIB / 0.1


def test_probe_that_brings_nothing_is_unfinished(port, server, monkeypatch):
    monkeypatch.setattr(probe, "PROBE_S", 0.5)
    with FaultProxy(("127.0.0.1", port), [Fault(stall_at=4 * KIB)]) as proxy:
        measured = CALLER.measure(SOURCE, loopback(proxy.port), MIB)

    assert measured.rtt_s is not None
    assert (measured.moved_bytes, measured.is_probe_unfinished) == (0, True)


@many_loopbacks
@pytest.mark.nightly
def test_prober_ranks_live_slow_and_dead_links(port, prober):
    slow_fault = [Fault(pause_s=0.02, chunk_bytes=32 * KIB)] * 50
    silent = [Fault(stall_at=0)] * 50
    with (
        FaultProxy(("127.0.0.1", port), slow_fault) as slow,
        FaultProxy(("127.0.0.1", port), silent) as dead,
    ):
        fast_address = Address("127.0.0.3", port, LinkKind.ETHERNET)
        slow_address = Address("127.0.0.1", slow.port, LinkKind.THUNDERBOLT)
        dead_address = Address("127.0.0.1", dead.port, LinkKind.THUNDERBOLT)
        table = LinkTable(SystemClock())
        prober(table)
        addresses = (slow_address, fast_address, dead_address)
        table.set_peers([PeerNode(SOURCE, 1, addresses)])

        def is_known():
            found = views(table)
            rates = [found["127.0.0.3", port], found["127.0.0.1", slow.port]]
            lost = found["127.0.0.1", dead.port].reachable is False
            return lost and all(view.bytes_per_s for view in rates)

        wait_until(is_known)
        ranked = [address for address, _ in table.rank(SOURCE, addresses)]
        found = views(table)

    assert ranked == [fast_address, slow_address, dead_address]
    assert found["127.0.0.1", dead.port].problem == "silent"
    assert found["127.0.0.3", port].rtt_s < found["127.0.0.1", slow.port].rtt_s


def test_failed_link_is_rediscovered(port, server, shelf, prober):
    table = LinkTable(SystemClock())
    with FaultProxy(("127.0.0.1", port)) as proxy:
        address = loopback(proxy.port)
        prober(table)
        table.set_peers([PeerNode(SOURCE, 1, (address,))])
        wait_until(lambda: table.views()[0].reachable)
        table.failed(SOURCE, address)  # as a transfer with broken streams reports
        assert table.views()[0].reachable is False
        wait_until(lambda: table.views()[0].reachable)


class Recorder:
    """A measure that records its calls and returns fixed results."""

    def __init__(self):
        self.measured = []

    def __call__(self, peer, address, probe_bytes=0):
        self.measured.append((peer, address.host, probe_bytes))
        return Measured(rtt_s=0.001, moved_bytes=probe_bytes, seconds=3.0 if probe_bytes else 0.0)


class SleepyClock(ManualClock):
    """A clock that follows the machine's, and can sleep as a Mac's does."""

    def __init__(self):
        super().__init__()
        self.slept_s = self.set_s = 0.0

    def monotonic_s(self):
        return time.monotonic()

    def elapsed_s(self):
        return time.monotonic() + self.slept_s

    def wall_s(self):
        return time.monotonic() + self.slept_s + self.set_s


def test_links_are_pinged_again_after_sleep_or_address_change(prober):
    clock, recorder = SleepyClock(), Recorder()
    interfaces = []
    table = LinkTable(clock)
    changes = []
    one = prober(
        table,
        recorder,
        clock,
        lambda: list(interfaces),
        changes.append,
        elapsed_s=clock.elapsed_s,
    )
    table.set_peers([PeerNode(SOURCE, 1, (loopback(1), loopback(2)))])

    def pings():
        return sum(probe_bytes == 0 for _, _, probe_bytes in recorder.measured)

    wait_until(lambda: pings() == 2)
    clock.slept_s += 3600.0
    wait_until(lambda: pings() == 4)
    interfaces.append("another cable")
    one._list_at_s = 0.0
    wait_until(lambda: pings() == 6)
    assert changes == [("another cable",)]
    time.sleep(0.2)
    assert pings() == 6  # and no more
    assert (
        sum(probe_bytes > 0 for _, _, probe_bytes in recorder.measured) == 1
    )  # a long probe is followed by a pause


def test_wall_clock_change_does_not_cause_pings(prober):
    clock, recorder = SleepyClock(), Recorder()
    table = LinkTable(clock)
    prober(table, recorder, clock, elapsed_s=clock.elapsed_s)
    table.set_peers([PeerNode(SOURCE, 1, (loopback(1),))])

    def pings():
        return sum(probe_bytes == 0 for _, _, probe_bytes in recorder.measured)

    wait_until(lambda: pings() == 1)
    for jump_s in (3600.0, -86_400.0, 1e8):
        clock.set_s += jump_s
        time.sleep(0.1)
    assert pings() == 1
    clock.slept_s += 3600.0  # a sleep of the machine does cause a ping
    wait_until(lambda: pings() == 2)


def test_refused_probe_is_reported_to_the_table(prober):
    def busy(peer, address, probe_bytes=0):
        return Measured(rtt_s=0.001, is_probe_unfinished=probe_bytes > 0)

    class Table(LinkTable):
        refused = 0

        def record_unfinished_probe(self, peer, address):
            self.refused += 1
            super().record_unfinished_probe(peer, address)

    table = Table(SystemClock())
    prober(table, busy)
    table.set_peers([PeerNode(SOURCE, 1, (loopback(1),))])
    wait_until(lambda: table.refused == 1)


def test_transfer_updates_the_table_and_uses_its_ranking(port, server, shelf):
    ref = shelf.add(8 * MIB)
    table = LinkTable(SystemClock())
    dead, live = loopback(closed_port(), LinkKind.THUNDERBOLT), loopback(port, LinkKind.WIFI)
    table.set_peers([PeerNode(SOURCE, 1, (dead, live))])
    assert table.rank(SOURCE, (live, dead))[0][0] == dead  # by its kind
    table.record_failure(SOURCE, dead, "refused")
    report, catch = fetch([dead, live], offer(server, [ref]), [ref], links=table)
    found = views(table)

    assert catch.blocks[ref.name] == shelf.payload(ref)
    assert report.blocks == 1
    assert found["127.0.0.1", port].bytes_per_s > 0
    assert found["127.0.0.1", port].reachable
    assert table.rank(SOURCE, (live, dead))[0][0] == live

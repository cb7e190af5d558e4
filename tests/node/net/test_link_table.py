"""The table ranks addresses by measured throughput and stays bounded."""

import threading

import pytest

from fabric.errors import TooLargeError
from fabric.ids import NodeName
from fabric.limits import ADDRESSES_MAX, MIB, PEERS_MAX
from fabric.net.link_estimate import PING_EVERY_S, PROBE_REST_MIN_S, RESTING_BYTES_PER_S
from fabric.net.links import Address, LinkKind, PeerList, PeerNode
from node.limits import LINKS_REPORTED_MAX
from node.net.link_table import LINKS_MAX, LinkTable
from tests.support.clocks import ManualClock

PEER = NodeName("mac-b")
CABLE = Address("10.88.0.2", 7, LinkKind.THUNDERBOLT, 10_000, "bridge0")
LAN = Address("192.168.1.2", 7, LinkKind.ETHERNET, 1_000, "en0")
WIFI = Address("192.168.1.3", 7, LinkKind.WIFI)
ALL = (WIFI, LAN, CABLE)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def table(clock):
    return LinkTable(clock)


def meet(table, *addresses, name=PEER, incarnation=1):
    table.set_peers([PeerNode(name, incarnation, addresses or ALL)])


def ranked_addresses(table, addresses=ALL):
    return [address for address, _ in table.rank(PEER, addresses)]


def test_nominal_speed_ranks_until_throughput_is_measured(table):
    assert ranked_addresses(table) == [CABLE, LAN, WIFI]

    table.observe(PEER, CABLE, 100 * MIB, 2.0)
    table.observe(PEER, LAN, 110 * MIB, 1.0)
    assert ranked_addresses(table) == [LAN, CABLE, WIFI]
    assert dict(table.rank(PEER, ALL))[CABLE] == 50 * MIB


def test_failed_link_ranks_last_until_it_answers(table, clock):
    table.failed(PEER, CABLE)
    assert ranked_addresses(table) == [LAN, WIFI, CABLE]
    assert dict(table.rank(PEER, ALL))[CABLE] == RESTING_BYTES_PER_S

    table.record_answer(PEER, CABLE, 0.0003, "bridge0", LinkKind.THUNDERBOLT)
    assert ranked_addresses(table)[0] == CABLE


def test_failed_links_rank_by_speed_and_failures(table, clock):
    for address in (CABLE, CABLE, LAN, WIFI):
        table.failed(PEER, address)
        clock.now_s += 10
    ranked = table.rank(PEER, ALL)

    assert [a for a, _ in ranked][-1] == CABLE
    assert all(rate > RESTING_BYTES_PER_S for _, rate in ranked)


def test_addresses_are_pinged_once_then_periodically_or_on_doubt(table, clock):
    meet(table)
    assert {address for _, address in table.due()} == set(ALL)
    assert table.due() == []
    for address in ALL:
        table.record_answer(PEER, address, 0.001, "en0", None)
    clock.now_s += PING_EVERY_S
    table.observe(PEER, LAN, MIB, 0.1)  # a recent answer: no ping needed
    assert {address for _, address in table.due()} == {CABLE, WIFI}
    table.expire_all()
    assert len(table.due()) == 3


def test_only_new_incarnation_of_a_peer_is_pinged_again(table):
    meet(table)
    table.due()
    meet(table)
    assert table.due() == []
    meet(table, incarnation=2)
    assert len(table.due()) == 3


def test_only_reachable_idle_links_are_probed_in_turn(table, clock):
    meet(table)
    assert table.due_probe() is None
    for address in ALL:
        table.record_answer(PEER, address, 0.001, "", None)
    table.failed(PEER, WIFI)
    probed = {table.due_probe()[1], table.due_probe()[1]}
    assert probed == {CABLE, LAN}
    assert table.due_probe() is None

    table.expire_all()
    table.observe(PEER, LAN, MIB, 0.1)
    assert table.due_probe() is None  # a transfer is under way
    clock.now_s += 6
    assert table.due_probe()[1] == CABLE


def test_refused_probe_is_repeated_after_a_rest(table, clock):
    meet(table, CABLE)
    table.record_answer(PEER, CABLE, 0.001, "", None)
    assert table.due_probe()[1] == CABLE
    table.record_unfinished_probe(PEER, CABLE)
    assert table.due_probe() is None
    clock.now_s += PROBE_REST_MIN_S
    assert table.due_probe()[1] == CABLE


def test_views_report_measurements_and_problems(table, clock):
    meet(table)
    table.record_answer(PEER, WIFI, 0.004, "en0", LinkKind.ETHERNET)
    table.record_rate(PEER, WIFI, 30 * MIB, 1.0)
    table.record_failure(PEER, CABLE, "host_unreachable", "bridge0")
    clock.now_s += 3
    views = {view.host: view for view in table.views()}

    wifi, cable, lan = (views[a.host] for a in (WIFI, CABLE, LAN))
    assert (wifi.reachable, wifi.device, wifi.kind) == (True, "en0", LinkKind.WIFI)
    assert (wifi.rtt_s, wifi.bytes_per_s, wifi.age_s, wifi.rate_age_s) == (0.004, 30 * MIB, 3, 3)
    assert (cable.reachable, cable.problem, cable.peer_device) == (
        False,
        "host_unreachable",
        "bridge0",
    )
    assert (lan.reachable, lan.rtt_s, lan.age_s) == (None, None, None)


def test_departed_peer_is_removed(table):
    meet(table)
    table.set_peers([])

    assert table.views() == ()
    assert table.due() == []


def test_links_of_unknown_peers_are_bounded(table):
    meet(table)
    for number in range(2 * LINKS_MAX):
        address = Address(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 7, LAN.kind)
        table.failed(NodeName("stranger"), address)

    assert len(table._links) <= LINKS_MAX
    assert len(table.views()) == 3


def test_peer_lists_and_reported_links_are_bounded(table):
    address = Address("10.0.0.1", 7, LinkKind.ETHERNET)
    with pytest.raises(TooLargeError):
        PeerList(tuple(PeerNode(NodeName(f"n{i}"), 1, ()) for i in range(PEERS_MAX + 1)))
    with pytest.raises(TooLargeError):
        PeerList((PeerNode(PEER, 1, (address,) * (ADDRESSES_MAX + 1)),))
    table.set_peers(
        [
            PeerNode(
                NodeName(f"n{i}"), 1, tuple(Address(f"10.0.{i}.{j}", 7, LAN.kind) for j in range(4))
            )
            for i in range(PEERS_MAX)
        ]
    )
    assert len(table.views()) == LINKS_REPORTED_MAX


def test_concurrent_updates_lose_no_link(table):
    meet(table)

    def work():
        for _ in range(200):
            table.observe(PEER, LAN, MIB, 0.01)
            table.rank(PEER, ALL)
            table.failed(PEER, WIFI)
            table.views()
            table.due()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {view.host for view in table.views()} == {a.host for a in ALL}
    assert ranked_addresses(table)[0] == CABLE

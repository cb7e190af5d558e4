"""Peer lists: the nearest nodes, rebuilt when a node joins, leaves or moves."""

from collections import Counter
from dataclasses import replace

import pytest

from fabric.net.links import Address, LinkKind
from router.fleet.agent_activity import RecentPartners
from router.fleet.peer_exchange import Neighbours, network_of, networks_of
from router.limits import PEERS_PER_NODE_MAX
from tests.router.placement.snapshots import view
from tests.router.rig import rig, until

ETHERNET, CABLE = LinkKind.ETHERNET, LinkKind.THUNDERBOLT


def node_view(number, *, machine=None, network=0, speed=1_000):
    address = Address(f"10.0.{network}.{number % 250}", 7, ETHERNET, speed, prefix_bits=24)
    host = f"machine-{machine if machine is not None else number}"
    return replace(view(f"n{number:04}"), host=host, addresses=(address,))


def neighbours_of(*views):
    neighbours = Neighbours()
    for each in views:
        neighbours.put(each)
    return neighbours


def names(neighbours, name):
    return [peer.name for peer in neighbours.list_for(name).peers]


def test_small_fleet_lists_all_peers():
    views = [node_view(number, network=number) for number in range(PEERS_PER_NODE_MAX + 1)]
    neighbours = neighbours_of(*views)

    for each in views:
        others = [other.name for other in views if other.name != each.name]
        assert names(neighbours, each.name) == others


def test_large_fleet_lists_nearest_peers():
    views = [
        node_view(number, network=number % 100, machine=number % 997) for number in range(1_000)
    ]
    neighbours = neighbours_of(*views)
    peers_of = {each.name: names(neighbours, each.name) for each in views}

    assert {len(peers) for peers in peers_of.values()} == {PEERS_PER_NODE_MAX}
    assert "n0997" in peers_of["n0000"], "on the same machine"
    assert {f"n{number:04}" for number in range(100, 1_000, 100)} <= set(peers_of["n0000"])
    listings = Counter(peer for peers in peers_of.values() for peer in peers)
    assert max(listings.values()) <= 2 * PEERS_PER_NODE_MAX, "no node is listed by all"


def test_recent_transfer_partners_are_listed():
    neighbours, partners = (
        neighbours_of(*(node_view(number) for number in range(100))),
        RecentPartners(),
    )
    for number in (50, 60, 70, 80, 90, 60, 0, 999):
        partners.note(f"n{number:04}", "n0000")
    peers = [peer.name for peer in neighbours.list_for("n0000", partners.of("n0000")).peers]

    assert partners.changed == {"n0000"}
    assert partners.of("n0000") == ("n0080", "n0090", "n0060", "n0999"), "those used last"
    assert {"n0080", "n0090", "n0060"} < set(peers)
    assert len(peers) == PEERS_PER_NODE_MAX
    assert "n0000" not in peers


def test_departed_or_moved_peers_are_dropped():
    neighbours = neighbours_of(*(node_view(number) for number in range(40)))
    neighbours.drop("n0001")
    neighbours.drop("n0001")
    assert "n0001" not in names(neighbours, "n0000")
    neighbours.put(replace(node_view(2, network=9), incarnation=5))
    [moved] = [p for p in neighbours.list_for("n0003").peers if p.name == "n0002"] or [None]
    assert moved is None or moved.incarnation == 5
    for number in range(40):
        neighbours.drop(f"n{number:04}")
    assert not neighbours._members


def test_networks_are_sorted_by_speed():
    slow = Address("192.168.1.9", 7, ETHERNET, 1_000, prefix_bits=24)
    cable = Address("169.254.3.4", 7, CABLE, 0, prefix_bits=16)
    assert networks_of((slow, cable)) == [
        (CABLE, network_of("169.254.0.0", 16)),
        (ETHERNET, network_of("192.168.1.1", 24)),
    ]
    assert network_of("192.168.1.1", 0) == network_of("192.168.1.2", 24)
    assert network_of("fe80::1", 64) == "fe80::1"


@pytest.mark.anyio
async def test_peer_lists_are_built_only_on_change(monkeypatch):
    listed_for = []
    real = Neighbours.list_for

    def count(self, name, partners):
        listed_for.append(name)
        return real(self, name, partners)

    monkeypatch.setattr(Neighbours, "list_for", count)
    async with rig("abc", tended=False) as fabric:
        exchange = fabric.services.peer_exchange
        await exchange.round()
        nodes = fabric.nodes.values()
        await until(lambda: all(len(getattr(node, "peers", ())) == 2 for node in nodes))
        assert sorted(listed_for) == ["node-a", "node-b", "node-c"]
        await fabric.fleet.membership.refresh()
        await exchange.round()
        assert len(listed_for) == 3
        address = Address("127.0.0.9", 7, LinkKind.LOOPBACK)
        fabric["node-a"].view_changes = {"addresses": (address,)}
        await fabric.fleet.membership.refresh()
        await exchange.round()
        receivers = [fabric[name] for name in ("node-b", "node-c")]
        await until(lambda: all(node.peers[0].addresses == (address,) for node in receivers))
        assert len(listed_for) == 6
        fabric.fleet.partners.note("node-a", "node-b")
        await exchange.round()
        await exchange.round()
        assert listed_for[6:] == ["node-b"]

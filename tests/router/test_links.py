"""Nodes receive their peers, and their measurements are listed and exported."""

import asyncio

import pytest

from fabric.errors import RejectedError
from fabric.ids import NodeName
from fabric.net.links import Address, LinkKind, LinkView
from router.fleet import snapshots
from router.placement.agent_moves import routes
from tests.router.fake_node import FakeNode
from tests.router.rig import rig, until

pytestmark = pytest.mark.anyio

A, B = NodeName("node-a"), NodeName("node-b")
CABLE = Address("10.88.0.1", 7, LinkKind.THUNDERBOLT, 10_000, "bridge0")
LAN = Address("192.168.1.10", 7, LinkKind.ETHERNET, 1_000, "en0")


def link(peer, address, **known):
    return LinkView(peer, address.host, address.port, address.kind, **known)


def names(node):
    return [peer.name for peer in getattr(node, "peers", ())]


async def test_nodes_receive_peers_and_their_changes():
    async with rig("abc", scale=4.0) as fabric:
        a, b, c = (fabric[f"node-{letter}"] for letter in "abc")
        await until(lambda: all(len(names(node)) == 2 for node in (a, b, c)))
        assert names(b) == ["node-a", "node-c"]

        c.view_changes = {"addresses": (CABLE, LAN)}  # a cable was plugged in
        await until(lambda: a.peers[1].addresses == (CABLE, LAN))
        assert a.peers[1].incarnation == 1
        calls = a.calls["meet_peers"]
        await c.restart()
        await until(lambda: a.peers[1].incarnation == 2)
        await until(lambda: len(names(c)) == 2)
        assert a.calls["meet_peers"] - calls <= 3  # on change only

        await b.stop()
        await until(lambda: names(a) == ["node-c"])


async def test_refusing_or_hung_node_does_not_block_peer_exchange():
    old, hung = FakeNode("node-b"), FakeNode("node-c")

    def refuse(_):
        message = "unknown control call"
        raise RejectedError(message, code="unknown_call")

    async def hang(_):
        await asyncio.sleep(3600)

    old._meet, hung._meet = refuse, hang
    for node in (old, hung):
        node._handlers = node.handlers()
    async with rig(nodes=[FakeNode("node-a"), old, hung], scale=4.0) as fabric:
        await until(lambda: len(names(fabric["node-a"])) == 2)
        await until(lambda: old.calls["meet_peers"] == 1)
        await asyncio.sleep(0.6)
        assert old.calls["meet_peers"] == 1  # such a refusal is final


async def test_links_are_listed_and_exported():
    known = {"reachable": True, "rtt_s": 0.0003, "bytes_per_s": 1e9, "age_s": 1.0}
    links = (
        link(B, CABLE, **known),
        link(B, LAN, reachable=True, rtt_s=0.001, bytes_per_s=1e8),
        link(B, Address("10.0.0.1", 7, LinkKind.OTHER), reachable=False, problem="silent"),
    )
    async with rig("ab", tended=False) as fabric:
        fabric["node-a"].view_changes = {"links": links}
        fabric["node-b"].view_changes = {"addresses": (LAN, CABLE)}
        await fabric.fleet.membership.refresh()
        http = fabric.http()
        listed = (await http.get("/v1/nodes")).json()["data"][0]["links"]
        metrics = (await http.get("/metrics")).text

        fabric["node-a"].view_changes = {"links": (link(B, CABLE, reachable=False),)}
        await fabric.fleet.membership.refresh()
        later = (await http.get("/metrics")).text

    assert [entry["kind"] for entry in listed] == ["thunderbolt", "ethernet", "other"]
    assert (listed[0]["rtt_s"], listed[2]["problem"]) == (0.0003, "silent")
    label = 'kind="thunderbolt",node="node-a",peer="node-b"'
    assert f"macfabric_link_rtt_seconds{{{label}}} 0.0003" in metrics
    assert f"macfabric_link_bytes_per_second{{{label}}} 1e+09" in metrics
    assert 'kind="other"' not in metrics
    assert "macfabric_link_rtt_seconds{" not in later


async def test_expected_travel_time_uses_measured_link_rate():
    fast = link(B, CABLE, reachable=True, rtt_s=0.0, bytes_per_s=1e6)
    async with rig("ab", tended=False) as fabric:
        fabric["node-a"].view_changes = {"links": (fast,)}
        fabric["node-b"].view_changes = {"addresses": (LAN, CABLE)}
        http = fabric.http()
        await fabric.chat("word " * 10_000, agent="alice", http=http)
        key = ("default", "alice")
        found = []
        async with asyncio.timeout(60):  # a busy machine's nodes may be silent for a while
            while not found:
                await fabric.fleet.membership.refresh(relist=True)
                found = routes(snapshots.of_agent(fabric.fleet, key))
        [route] = found

        assert route.missing_bytes > 10_000
        assert route.travel_s == pytest.approx(0.03 + route.missing_bytes / 1e6)


async def test_transfer_counters_are_exported_under_known_names_only():
    made_up = {f"refused_made_up_{i}": 1 for i in range(50)}
    changes = {"sending": {"bytes": 5_000, **made_up}, "fetching": {"tampered": 3}}
    async with rig("ab", tended=False) as fabric:
        fabric["node-a"].view_changes = changes
        await fabric.fleet.membership.refresh()
        metrics = (await fabric.http().get("/metrics")).text

    name = "macfabric_transfer_events_total"
    assert f'{name}{{event="bytes",node="node-a",side="send"}} 5000.0' in metrics
    assert f'{name}{{event="tampered",node="node-a",side="fetch"}} 3.0' in metrics
    assert f'{name}{{event="other",node="node-a",side="send"}} 50.0' in metrics
    assert "made_up" not in metrics

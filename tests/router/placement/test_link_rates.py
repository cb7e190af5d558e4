from dataclasses import replace

import pytest

from fabric.control.node_calls import NodeView, SelfTest, TierBytes
from fabric.ids import NodeName
from fabric.net.links import Address, LinkKind, LinkView
from router.placement.link_rates import rate

A, B = NodeName("a"), NodeName("b")
CABLE = Address("169.254.1.1", 7, LinkKind.THUNDERBOLT, 20_000)
LAN, FAST_LAN = (Address("10.0.0.1", 7, LinkKind.ETHERNET, mbit) for mbit in (1_000, 10_000))
LOOP, AIR = (Address("x", 7, kind) for kind in (LinkKind.LOOPBACK, LinkKind.WIFI))
GIGABIT = 125e6


def node(name, *addresses, host=None, links=()):
    tiers, test = TierBytes(0, 0), SelfTest(passed=True, detail="", seconds=0.0)
    words = (name, host or name, 1, 1, "", "m", "f", 1, "ready", 0, 0)
    view = NodeView(*words, tiers, addresses, 0, 0, 0.0, 0.0, 0.0, 1, test)
    return replace(view, links=links)


def link(peer, address, **known):
    return LinkView(peer, address.host, address.port, address.kind, **known)


def measured_link(peer, address, bytes_per_s):
    return link(peer, address, reachable=True, bytes_per_s=bytes_per_s)


@pytest.mark.parametrize(
    ("source", "target", "nominal"),
    [
        (node(A, CABLE, LAN), node(B, CABLE, FAST_LAN), 2.5e9),
        (node(A, LAN), node(B, CABLE, FAST_LAN), GIGABIT),
        (node(A, LOOP, AIR), node(B, LOOP, AIR), 300e6 / 8),
        (node(A, LOOP, host="one"), node(B, LOOP, host="one"), 5e9),
        (node(A, AIR), node(B, LAN), GIGABIT),
    ],
    ids=["cable", "slower end", "own loopback only", "one machine", "nothing in common"],
)
def test_unmeasured_rate_is_a_share_of_best_common_link(source, target, nominal):
    assert rate(source, target) == pytest.approx(0.7 * nominal)


def test_measured_rate_counts_in_full():
    target = node(
        B, CABLE, LAN, links=(measured_link(A, LAN, 1.1e8), measured_link(A, CABLE, 1.8e9))
    )

    assert rate(node(A, CABLE, LAN), target) == 1.8e9


def test_source_measurement_is_used_without_one_of_target():
    source = node(
        A, CABLE, links=(measured_link(B, CABLE, 1.5e9), measured_link(NodeName("c"), CABLE, 3e9))
    )

    assert rate(source, node(B, CABLE)) == 1.5e9
    assert rate(source, node(B, CABLE, links=(measured_link(A, CABLE, 1e9),))) == 1e9


def test_unreachable_link_is_ignored():
    dead = link(A, CABLE, reachable=False, bytes_per_s=2e9)

    assert rate(node(A, CABLE, LAN), node(B, CABLE, LAN, links=(dead,))) == 0.7 * GIGABIT

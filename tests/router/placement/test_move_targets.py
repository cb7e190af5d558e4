from dataclasses import replace

import pytest

from fabric.control.node_calls import DRAINING, AgentView, TierBytes
from fabric.limits import GIB, MIB
from fabric.net.links import LinkKind, LinkView
from fabric.record.manifest import OwnerState
from router.placement.agent_moves import destination, missing_bytes, routes
from router.placement.decision import Ship
from router.placement.load_ledger import Ledger
from router.placement.snapshot import HolderRole
from tests.router.placement.snapshots import fleet, holder, node

GIGABIT, THUNDERBOLT = 125e6, 2e9
ROOM = TierBytes(hot=8 * GIB, disk=100 * GIB)


def agent(tokens, disk, hot=0):
    names = ("t", "alice", None, "a", OwnerState.OWNED, 1, 1)
    return AgentView(*names, tokens, 1, TierBytes(hot, disk), ("disk",), False, 0.0, 0.0)


OWNER, HOME = holder("home", HolderRole.OWNER, agent(1000, 2 * GIB)), node("home")
UP_TO_DATE = holder("other", HolderRole.COPY, agent(1000, 2 * GIB))


def link(bytes_per_s):
    address = ("10.0.0.1", 7, LinkKind.ETHERNET)
    return (LinkView("home", *address, reachable=True, bytes_per_s=bytes_per_s),)


def site(name="other", **changes):
    plain = {"prefill": 300.0, "decode": 30.0, "free": ROOM, "links": link(GIGABIT)}
    return node(name, **plain | changes)


def free_room(hot=8 * GIB, disk=100 * GIB):
    return {"free": TierBytes(hot, disk)}


def fleet_of(*nodes, holders=(OWNER,)):
    return fleet(HOME, *nodes, holders=holders)


@pytest.mark.parametrize(
    ("copies", "other", "wins"),
    [
        ([UP_TO_DATE], site(), True),
        ([UP_TO_DATE], site(prefill=3.0), False),  # current copy, but a slow node
        ([], site(links=link(THUNDERBOLT)), True),
        ([], site(prefill=900.0, decode=90.0), True),
        ([], site(prefill=0.0, decode=0.0), True),  # not measured: assumed average
        ([], site(known={"promised_s": 20.0}), False),
        ([], site(known={"turns": 6}), False),
        ([], site(**free_room(hot=GIB), tokens=5), False),
        ([], site(**free_room(disk=GIB)), False),
        # Other agents are on their way there.
        ([], site(known={"coming_bytes": 99 * GIB}, links=link(THUNDERBOLT)), False),
        ([], site(tokens=5), False),
        ([UP_TO_DATE], site(fingerprint="another model's"), False),
        ([UP_TO_DATE], site(state=DRAINING), False),
        ([UP_TO_DATE], site(known={"is_alive": False}), False),
        ([UP_TO_DATE], site(reuse=False), False),
        ([UP_TO_DATE], site(degraded="the disk is full"), False),
    ],
)
def test_destination_is_cheapest_node_in_seconds(copies, other, wins):
    chosen = destination(fleet_of(site("plain"), other, holders=(OWNER, *copies)))

    assert chosen.target == ("other" if wins else "plain")
    assert chosen.missing_bytes == (0 if copies and wins else 2 * GIB)


def test_no_destination_without_room():
    assert destination(fleet_of()) is None
    assert destination(fleet_of(site(**free_room(disk=MIB)))) is None
    assert destination(fleet_of(site(free=None))) is not None


def test_no_route_without_an_owner():
    released = replace(OWNER, role=HolderRole.RELEASED)

    assert routes(fleet_of(site(), holders=())) == []
    assert routes(fleet_of(site(), holders=(released,))) == []
    assert destination(fleet_of(site(), holders=(released,))) is None


def test_routes_are_sorted_by_time_then_by_free_space():
    nodes = site("a", tokens=9), site("b", links=link(THUNDERBOLT)), site(), site("c")
    found = routes(fleet_of(*nodes, holders=(OWNER, UP_TO_DATE)))

    assert [way.target for way in found] == ["other", "b", "c", "a"]
    assert [way.missing_bytes for way in found] == [0, *[2 * GIB] * 3]
    assert found[0].travel_s < 0.1
    assert found[1].travel_s == pytest.approx(0.03 + 2 * GIB / THUNDERBOLT)
    assert found[2].travel_s == pytest.approx(0.03 + 2 * GIB / GIGABIT)


def test_bytes_in_flight_count_at_their_target():
    ledger, ship = Ledger(), Ship("home", "other", 5 * GIB, 1.0)
    with ledger.shipping(ship), ledger.shipping(ship):
        assert ledger.coming_bytes("other") == 10 * GIB
        assert ledger.coming_bytes("home") == 0
    assert ledger.coming_bytes("other") == 0


def test_missing_bytes_of_older_copy_are_newer_tokens():
    assert missing_bytes(agent(1000, 500), None) == 500
    assert missing_bytes(agent(1000, 500), agent(800, 400)) == 100
    assert missing_bytes(agent(1000, 500), agent(1200, 600)) == 0
    assert missing_bytes(agent(1000, 0, hot=700), None) == 700
    assert missing_bytes(None, None) == missing_bytes(agent(0, 0), None) == 0

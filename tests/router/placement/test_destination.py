from dataclasses import replace

import pytest

from fabric.control.node_calls import AgentView, TierBytes
from fabric.limits import GIB, MIB
from fabric.record.manifest import OwnerState
from router.moves.move_candidates import missing_bytes
from router.placement.destination import Site, choose_site, travel_s

GIGABIT, THUNDERBOLT = 125e6, 2e9
PLAIN = Site(
    name="plain",
    missing_bytes=2 * GIB,
    link_bytes_per_s=GIGABIT,
    prefill_tokens_per_s=300.0,
    decode_tokens_per_s=30.0,
    hot_free_bytes=8 * GIB,
    disk_free_bytes=100 * GIB,
)


def other(**changes):
    return replace(PLAIN, name="other", **changes)


@pytest.mark.parametrize(
    ("site", "wins"),
    [
        (other(missing_bytes=0), True),  # its copy is up to date
        (
            other(missing_bytes=0, prefill_tokens_per_s=3.0),
            False,
        ),  # but it would be no place to live
        (other(link_bytes_per_s=THUNDERBOLT), True),
        (other(prefill_tokens_per_s=900.0, decode_tokens_per_s=90.0), True),
        (other(prefill_tokens_per_s=0.0, decode_tokens_per_s=0.0), True),  # not measured: as usual
        (other(queue_s=20.0), False),
        (other(active=6), False),
        (other(hot_free_bytes=GIB, held_tokens=5), False),
        (other(disk_free_bytes=GIB), False),
        (other(held_tokens=5), False),
    ],
)
def test_the_cheapest_in_seconds_gets_the_agent(site, wins):
    chosen = choose_site([PLAIN, site], 2 * GIB)

    assert (chosen is site) is wins


def test_nobody_has_room():
    assert choose_site([], GIB) is None
    assert choose_site([other(disk_free_bytes=MIB)], GIB) is None
    assert choose_site([other(disk_free_bytes=None, hot_free_bytes=None)], GIB) is not None


def test_travel_grows_with_bytes_and_shrinks_with_the_link():
    assert travel_s(other(missing_bytes=0)) < 0.1
    assert travel_s(PLAIN) == pytest.approx(0.03 + 2 * GIB / GIGABIT)
    assert travel_s(other(link_bytes_per_s=THUNDERBOLT)) < travel_s(PLAIN) / 10


def agent(tokens, disk, hot=0):
    names = ("t", "alice", None, "a", OwnerState.OWNED, 1, 1)
    return AgentView(*names, tokens, 1, TierBytes(hot, disk), ("disk",), False, 0.0, 0.0)


def test_an_older_copy_lacks_what_came_since():
    assert missing_bytes(agent(1000, 500), None) == 500
    assert missing_bytes(agent(1000, 500), agent(800, 400)) == 100
    assert missing_bytes(agent(1000, 500), agent(1200, 600)) == 0
    assert missing_bytes(agent(1000, 0, hot=700), None) == 700
    assert missing_bytes(None, None) == missing_bytes(agent(0, 0), None) == 0

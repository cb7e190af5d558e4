"""From which node a turn's node takes a beginning, and when it computes it instead."""

from dataclasses import replace

import pytest

from fabric import PROTOCOL_VERSION
from fabric.ids import NodeName
from fabric.net.links import Address, LinkKind, LinkView
from router.placement.decision import TurnFacts
from router.placement.head_lenders import head_loan
from router.placement.sketch_index import HeadState
from router.placement.snapshot import PrefixHolder
from tests.router.placement.snapshots import fleet, node

HERE, FAR, SLOW = NodeName("here"), NodeName("far"), NodeName("slow")
TURN = TurnFacts("m", 5_000, 100, "seed")
MIB = 1 << 20


def link(peer, bytes_per_s):
    return LinkView(
        NodeName(peer), peer, 7, LinkKind.ETHERNET, "", "", True, bytes_per_s=bytes_per_s
    )


def of(name, known=None, **words):
    address = Address(name, 7, LinkKind.ETHERNET)
    words = {"protocol": PROTOCOL_VERSION, "addresses": (address,), "host": name, **words}
    return node(name, known=known, **words)


def here(bytes_per_s=100 * MIB, **words):
    links = (link(FAR, bytes_per_s), link(SLOW, bytes_per_s / 10))
    return of(HERE, links=links, **words)


def has(name, share=0.8, **words):
    return PrefixHolder(NodeName(name), share, **words)


def loan(*nodes, prefixes):
    found = head_loan(TURN, fleet(*nodes, prefixes=prefixes), HERE)
    return None if found is None else found.loan.source


def test_longest_beginning_that_arrives_sooner_is_fetched():
    nodes = [here(), of(FAR), of(SLOW)]
    found = head_loan(TURN, fleet(*nodes, prefixes=[has(FAR, 0.8), has(SLOW, 0.3)]), HERE)
    assert found.loan.source == FAR
    assert found.loan.addresses == nodes[1].view.addresses
    assert found.tokens == 3_840
    assert found.saved_s == pytest.approx(3.84)
    assert found.travel_s == pytest.approx(0.03 + 3_840 * 1_000 / (100 * MIB))
    assert loan(*nodes, prefixes=[has(FAR, 0.8), has(SLOW, 0.8)]) == FAR, "the faster link"


def test_slow_links_and_short_heads_lead_to_recomputation():
    assert loan(here(0.9 * MIB), of(FAR), prefixes=[has(FAR)]) is None, (
        "1,000 tokens of 1 kB a second"
    )
    assert loan(here(1.1 * MIB), of(FAR), prefixes=[has(FAR)]) == FAR
    assert loan(here(), of(FAR), prefixes=[has(FAR, 0.1)]) is None
    assert loan(here(prefill=1e6), of(FAR), prefixes=[has(FAR)]) is None, "a fast node"


def test_cached_tokens_are_not_fetched():
    assert loan(here(), of(FAR), prefixes=[has(FAR, 0.8), has(HERE, 0.75)]) is None
    assert loan(here(), of(FAR), prefixes=[has(FAR, 0.8), has(HERE, 0.3)]) == FAR
    assert loan(here(), prefixes=[has(HERE, 0.8)]) is None
    assert loan(here(), of(FAR), prefixes=[]) is None


@pytest.mark.parametrize(
    "words",
    [
        {"fingerprint": "of another model"},
        {"protocol": None},
        {"protocol": PROTOCOL_VERSION + 1},
        {"reuse": False},
        {"known": {"is_alive": False}},
    ],
)
def test_unfit_lenders_are_not_named(words):
    assert loan(here(), of(FAR, **words), prefixes=[has(FAR)]) is None
    assert loan(here(), of(FAR, **words), of(SLOW), prefixes=[has(FAR), has(SLOW)]) == SLOW


@pytest.mark.parametrize("words", [{"protocol": None}, {"reuse": False}, {"degraded": "full"}])
def test_nodes_that_cannot_store_blocks_fetch_nothing(words):
    assert loan(here(**words), of(FAR), prefixes=[has(FAR)]) is None


def test_head_in_progress_is_awaited_only_while_it_costs_no_time():
    busy = of(FAR, known={"promised_s": 3.0})
    coming = has(FAR, state=HeadState.COMING)
    found = head_loan(TURN, fleet(here(), busy, prefixes=[coming]), HERE)
    assert found.loan.is_coming
    assert found.travel_s > 3.0
    busy = of(FAR, known={"promised_s": 30.0})
    assert loan(here(), busy, prefixes=[coming]) is None
    queued = replace(here(), promised_s=30.0)
    assert loan(queued, busy, prefixes=[coming]) == FAR, "it comes before the turn's own memory"
    stored = has(FAR)
    assert not head_loan(TURN, fleet(here(), busy, prefixes=[stored]), HERE).loan.is_coming


def test_borrowing_nodes_do_not_lend():
    borrowed = has(FAR, state=HeadState.BORROWED)
    assert loan(here(), of(FAR), prefixes=[borrowed]) is None

"""The node that lends a turn's node a prefix, and when the prefix is computed instead."""

from dataclasses import replace

import pytest

from fabric import PROTOCOL_VERSION
from fabric.ids import NodeName
from fabric.net.links import Address, LinkKind, LinkView
from router.placement.choice import Policy
from router.placement.decision import How, TurnFacts
from router.placement.placement import Placement
from router.placement.sketch_index import HeadState
from router.placement.snapshot import HolderRole, PrefixHolder
from tests.router.placement.snapshots import fleet, holder, node

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


def decide(*nodes, prefixes, turn=TURN, policy=Policy.ROUND_ROBIN):
    """Place a turn; HERE is the first node in round-robin order."""
    others = [replace(each, turn_order=1) for each in nodes if each.name != HERE]
    home = [each for each in nodes if each.name == HERE]
    return Placement(policy).decide(turn, fleet(*home, *others, prefixes=prefixes))


def loan(*nodes, prefixes, turn=TURN):
    decision = decide(*nodes, prefixes=prefixes, turn=turn)
    assert decision.node == HERE
    assert (decision.how is How.FETCH) == (decision.loan is not None)
    assert decision.source == (decision.loan and decision.loan.source)
    return decision.source


def test_longest_beginning_that_arrives_sooner_is_fetched():
    nodes = [here(), of(FAR), of(SLOW)]
    decision = decide(*nodes, prefixes=[has(FAR, 0.8), has(SLOW, 0.3)])
    assert decision.loan.source == FAR
    assert decision.loan.addresses == nodes[1].view.addresses
    assert not decision.loan.is_coming
    assert decision.prefill_s == pytest.approx(5.0 - 3.84)
    assert decision.terms.bring_s == pytest.approx(0.03 + 3_840 * 1_000 / (100 * MIB))
    assert loan(*nodes, prefixes=[has(FAR, 0.8), has(SLOW, 0.8)]) == FAR, "the faster link"


def test_slow_links_and_short_heads_lead_to_recomputation():
    assert loan(here(0.9 * MIB), of(FAR), prefixes=[has(FAR)]) is None, (
        "1,000 tokens of 1 kB a second"
    )
    assert loan(here(1.1 * MIB), of(FAR), prefixes=[has(FAR)]) == FAR
    assert loan(here(), of(FAR), prefixes=[has(FAR, 0.1)]) is None
    assert loan(here(prefill=1e6), of(FAR), prefixes=[has(FAR)]) is None, "a fast node"
    assert loan(here(), of(FAR), prefixes=[has(FAR)], turn=replace(TURN, may_fetch=False)) is None


def test_cached_tokens_are_not_fetched():
    for share, source in ((0.75, None), (0.3, FAR)):
        decision = decide(here(), of(FAR), prefixes=[has(FAR, 0.8), has(HERE, share)])
        assert decision.source == source
    assert decide(here(), prefixes=[has(HERE, 0.8)]).how is How.LOAD
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
    decision = decide(here(), busy, prefixes=[coming])
    assert decision.loan.is_coming
    assert decision.terms.bring_s > 3.0
    busy = of(FAR, known={"promised_s": 30.0})
    assert loan(here(), busy, prefixes=[coming]) is None
    queued = replace(here(), promised_s=30.0)
    assert loan(queued, busy, prefixes=[coming]) == FAR, "it arrives before the turn has memory"
    assert not decide(here(), busy, prefixes=[has(FAR)]).loan.is_coming


def test_borrowing_nodes_do_not_lend():
    borrowed = has(FAR, state=HeadState.BORROWED)
    assert loan(here(), of(FAR), prefixes=[borrowed]) is None


def test_node_with_a_cheap_link_to_a_lender_is_chosen():
    """The lender is busy; of two idle nodes, the one with a slow link computes faster."""
    lender = of(FAR, known={"promised_s": 60.0, "turns": 8})
    near = of("near", links=(link(FAR, 1_000 * MIB),), prefill=900.0)
    distant = of("distant", links=(link(FAR, MIB // 2),))
    decision = decide(lender, near, distant, prefixes=[has(FAR)], policy=Policy.SECONDS)
    assert (decision.how, decision.node, decision.source) == (How.FETCH, "near", FAR)
    decision = decide(lender, near, distant, prefixes=[], policy=Policy.SECONDS)
    assert (decision.how, decision.node) == (How.RECOMPUTE, "distant")


def test_owner_of_an_agent_fetches_a_longer_beginning():
    holders = (holder(HERE, HolderRole.OWNER),)
    snapshot = fleet(here(), of(FAR), prefixes=[has(FAR)], holders=holders)
    decision = Placement().decide(replace(TURN, agent="alice"), snapshot)
    assert (decision.how, decision.node, decision.source) == (How.STAY, HERE, FAR)


def test_lenders_of_another_model_do_not_hide_those_of_this_one():
    others = [of(f"other{at}", model="n", fingerprint="n") for at in range(9)]
    prefixes = [*(has(each.name, 0.9) for each in others), has(FAR)]
    assert loan(here(), *others, of(FAR), prefixes=prefixes) == FAR


def test_each_turn_gets_the_loan_that_its_node_is_about_to_take():
    """The first turn to arrive begins the fetch, in whatever order turns were placed."""
    coming = has(FAR, state=HeadState.COMING)
    prefixes = [coming, has(HERE, state=HeadState.BORROWED)]
    assert loan(here(), of(FAR), prefixes=prefixes) == FAR
    first = decide(here(), of(FAR), prefixes=[coming]).terms
    second = decide(here(), of(FAR), prefixes=prefixes).terms
    assert second.bring_s < first.bring_s, "the bytes are sent once"


def test_lender_sends_to_one_node_after_another():
    free = decide(here(), of(FAR), prefixes=[has(FAR)]).terms
    sending = of(FAR, known={"leaving_bytes": 50 * MIB})
    assert decide(here(), sending, prefixes=[has(FAR)]).terms.bring_s == pytest.approx(
        free.bring_s + 0.5
    )

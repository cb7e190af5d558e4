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


def remote(name, known=None, **words):
    address = Address(name, 7, LinkKind.ETHERNET)
    words = {"protocol": PROTOCOL_VERSION, "addresses": (address,), "host": name, **words}
    return node(name, known=known, **words)


def local(bytes_per_s=100 * MIB, **words):
    links = (link(FAR, bytes_per_s), link(SLOW, bytes_per_s / 10))
    return remote(HERE, links=links, **words)


def head_on(name, share=0.8, **words):
    return PrefixHolder(NodeName(name), share, **words)


def decide(*nodes, prefixes, turn=TURN, policy=Policy.ROUND_ROBIN):
    """Place a turn; HERE is the first node in round-robin order."""
    others = [replace(each, turn_order=1) for each in nodes if each.name != HERE]
    home = [each for each in nodes if each.name == HERE]
    return Placement(policy).decide(turn, fleet(*home, *others, prefixes=prefixes))


def lender_of(*nodes, prefixes, turn=TURN):
    decision = decide(*nodes, prefixes=prefixes, turn=turn)
    assert decision.node == HERE
    assert (decision.how is How.FETCH) == (decision.loan is not None)
    assert decision.source == (decision.loan and decision.loan.source)
    return decision.source


def test_longest_beginning_that_arrives_sooner_is_fetched():
    nodes = [local(), remote(FAR), remote(SLOW)]
    decision = decide(*nodes, prefixes=[head_on(FAR, 0.8), head_on(SLOW, 0.3)])
    assert decision.loan.source == FAR
    assert decision.loan.addresses == nodes[1].view.addresses
    assert not decision.loan.is_coming
    assert decision.terms.prefill_s == pytest.approx(5.0 - 3.84)
    assert decision.terms.bring_s == pytest.approx(0.03 + 3_840 * 1_000 / (100 * MIB))
    assert lender_of(*nodes, prefixes=[head_on(FAR, 0.8), head_on(SLOW, 0.8)]) == FAR, (
        "the faster link"
    )


def test_slow_links_and_short_heads_lead_to_recomputation():
    assert lender_of(local(0.9 * MIB), remote(FAR), prefixes=[head_on(FAR)]) is None, (
        "1,000 tokens of 1 kB a second"
    )
    assert lender_of(local(1.1 * MIB), remote(FAR), prefixes=[head_on(FAR)]) == FAR
    assert lender_of(local(), remote(FAR), prefixes=[head_on(FAR, 0.1)]) is None
    assert lender_of(local(prefill=1e6), remote(FAR), prefixes=[head_on(FAR)]) is None, (
        "a fast node"
    )
    assert (
        lender_of(
            local(), remote(FAR), prefixes=[head_on(FAR)], turn=replace(TURN, may_fetch=False)
        )
        is None
    )


def test_cached_tokens_are_not_fetched():
    for share, source in ((0.75, None), (0.3, FAR)):
        decision = decide(local(), remote(FAR), prefixes=[head_on(FAR, 0.8), head_on(HERE, share)])
        assert decision.source == source
    assert decide(local(), prefixes=[head_on(HERE, 0.8)]).how is How.LOAD
    assert lender_of(local(), remote(FAR), prefixes=[]) is None


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
    assert lender_of(local(), remote(FAR, **words), prefixes=[head_on(FAR)]) is None
    assert (
        lender_of(
            local(), remote(FAR, **words), remote(SLOW), prefixes=[head_on(FAR), head_on(SLOW)]
        )
        == SLOW
    )


@pytest.mark.parametrize("words", [{"protocol": None}, {"reuse": False}, {"degraded": "full"}])
def test_nodes_that_cannot_store_blocks_fetch_nothing(words):
    assert lender_of(local(**words), remote(FAR), prefixes=[head_on(FAR)]) is None


def test_head_in_progress_is_awaited_only_while_it_costs_no_time():
    busy = remote(FAR, known={"promised_s": 3.0})
    coming = head_on(FAR, state=HeadState.COMING)
    decision = decide(local(), busy, prefixes=[coming])
    assert decision.loan.is_coming
    assert decision.terms.bring_s > 3.0
    busy = remote(FAR, known={"promised_s": 30.0})
    assert lender_of(local(), busy, prefixes=[coming]) is None
    queued = replace(local(), promised_s=30.0)
    assert lender_of(queued, busy, prefixes=[coming]) == FAR, (
        "it arrives before the turn has memory"
    )
    assert not decide(local(), busy, prefixes=[head_on(FAR)]).loan.is_coming


def test_borrowing_nodes_do_not_lend():
    borrowed = head_on(FAR, state=HeadState.BORROWED)
    assert lender_of(local(), remote(FAR), prefixes=[borrowed]) is None


def test_node_with_a_cheap_link_to_a_lender_is_chosen():
    """The lender is busy; of two idle nodes, the one with a slow link computes faster."""
    lender = remote(FAR, known={"promised_s": 60.0, "turns": 8})
    near = remote("near", links=(link(FAR, 1_000 * MIB),), prefill=900.0)
    distant = remote("distant", links=(link(FAR, MIB // 2),))
    decision = decide(lender, near, distant, prefixes=[head_on(FAR)], policy=Policy.SECONDS)
    assert (decision.how, decision.node, decision.source) == (How.FETCH, "near", FAR)
    decision = decide(lender, near, distant, prefixes=[], policy=Policy.SECONDS)
    assert (decision.how, decision.node) == (How.RECOMPUTE, "distant")


def test_owner_of_an_agent_fetches_a_longer_beginning():
    holders = (holder(HERE, HolderRole.OWNER),)
    snapshot = fleet(local(), remote(FAR), prefixes=[head_on(FAR)], holders=holders)
    decision = Placement().decide(replace(TURN, agent="alice"), snapshot)
    assert (decision.how, decision.node, decision.source) == (How.STAY, HERE, FAR)


def test_lenders_of_another_model_do_not_hide_those_of_this_one():
    others = [remote(f"other{at}", model="n", fingerprint="n") for at in range(9)]
    prefixes = [*(head_on(each.name, 0.9) for each in others), head_on(FAR)]
    assert lender_of(local(), *others, remote(FAR), prefixes=prefixes) == FAR


def test_each_turn_gets_the_loan_that_its_node_is_about_to_take():
    """The first turn to arrive begins the fetch, in any order of placement."""
    coming = head_on(FAR, state=HeadState.COMING)
    prefixes = [coming, head_on(HERE, state=HeadState.BORROWED)]
    assert lender_of(local(), remote(FAR), prefixes=prefixes) == FAR
    first = decide(local(), remote(FAR), prefixes=[coming]).terms
    second = decide(local(), remote(FAR), prefixes=prefixes).terms
    assert second.bring_s < first.bring_s, "the bytes are sent once"


def test_lender_sends_to_one_node_after_another():
    free = decide(local(), remote(FAR), prefixes=[head_on(FAR)]).terms
    sending = remote(FAR, known={"leaving_bytes": 50 * MIB})
    assert decide(local(), sending, prefixes=[head_on(FAR)]).terms.bring_s == pytest.approx(
        free.bring_s + 0.5
    )

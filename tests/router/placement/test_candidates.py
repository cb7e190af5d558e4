"""The few candidates of a large fleet against all of its nodes."""

import random

import pytest

from router.placement.candidates import Cached, Ranking, TurnWork
from router.placement.decision import TurnFacts
from router.placement.options import options_of
from router.placement.placement import Placement
from router.placement.seconds import tie_limit_s
from router.placement.sketch_index import NodeCounts
from router.placement.snapshot import FleetSnapshot, PrefixHolder
from tests.router.placement.snapshots import node

TURN = TurnFacts("m", 8_000, 256, "t:7")
WORK = TurnWork.of(TURN.prompt_tokens, TURN.completion_tokens_max)


def no_node(_):
    return False


def random_nodes(seed, count=200):
    """Make nodes of three classes of machine, some busy, some over their share."""
    draw = random.Random(seed)
    return [
        node(
            f"n{at:03}",
            prefill=draw.choice([300, 800, 1_200]) * draw.uniform(0.9, 1.1),
            decode=draw.uniform(20, 60),
            known={
                "promised_s": draw.choice([0.0, 0.0, 2.0, 20.0]) * draw.random(),
                "turns": draw.randrange(4),
                "agents": draw.choice([0, draw.randrange(1, 20)]),
                "cold_order": draw.randrange(1_000),
            },
        )
        for at in range(count)
    ]


def ranked(nodes):
    ranking = Ranking()
    for each in nodes:
        ranking.put(each)
    return ranking


def by_name(nodes):
    return {each.name: each for each in nodes}


def costs_of_nodes(fleet):
    """The cost of the cheapest option on each node."""
    options = sorted(options_of(TURN, fleet, None), key=lambda option: -option.terms.total_s)
    return {option.node.name: option.terms.total_s for option in options}


@pytest.mark.parametrize("seed", range(5))
def test_ranking_cost_equals_decision_cost(seed):
    nodes = random_nodes(seed)
    ranking = ranked(nodes)
    snapshot = FleetSnapshot(by_name(nodes), totals=ranking.totals)

    expected = costs_of_nodes(snapshot)
    found = dict(zip((each.name for each in nodes), ranking._costs(WORK, ()), strict=True))

    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_decision_among_candidates_costs_no_more_than_among_all(seed):
    nodes = random_nodes(seed)
    ranking, draw = ranked(nodes), random.Random(seed)
    holders = draw.sample(nodes, draw.choice([3, 50, 190]))
    prefixes = [PrefixHolder(each.name, 0.5, is_resident=True) for each in holders]
    cached = [Cached(3_840, NodeCounts((each.name, 1) for each in holders))]
    names = set(ranking.cheapest(WORK, 16, no_node, cached))
    few = FleetSnapshot(
        {each.name: each for each in nodes if each.name in names},
        prefixes=[prefix for prefix in prefixes if prefix.node in names],
        totals=ranking.totals,
    )
    costs = costs_of_nodes(FleetSnapshot(by_name(nodes), prefixes=prefixes))

    chosen = Placement().decide(TURN, few).node

    assert len(names) == 16
    # Among nodes with nearly the best cost, the number of agents decides.
    assert costs[chosen] <= 1.01 * tie_limit_s(min(costs.values()))


def test_cached_prefix_counts_by_its_longest_match():
    nodes = [node(f"n{at:02}", known={"promised_s": 3.0}) for at in range(40)]
    ranking = ranked(nodes)
    most = Cached(2_000, NodeCounts((each.name, 1) for each in nodes[2:]))
    few = Cached(6_000, NodeCounts({nodes[5].name: 1, nodes[1].name: 1, "gone": 1}))

    assert set(ranking.cheapest(WORK, 2, no_node, [most, few])) == {"n05", "n01"}
    assert ranking.cheapest(WORK, 40, no_node, [most])[38:] == ["n00", "n01"], "in ranking order"


def test_nodes_that_come_and_go_count_in_the_next_decision():
    nodes = [node(f"n{at:02}") for at in range(40)]
    ranking = ranked(nodes)
    counts = NodeCounts({"n07": 1, "n09": 1})

    def first():
        return set(ranking.cheapest(WORK, 2, no_node, [Cached(6_000, counts)]))

    assert first() == {"n07", "n09"}
    counts.add("n07", 1)
    counts.add("n09", -1)
    counts.add("n30", 1)
    assert first() == {"n07", "n30"}
    ranking.drop("n07")
    ranking.put(node("n99"))
    counts.add("n99", 1)
    assert first() == {"n30", "n99"}


def test_refused_nodes_are_replaced_by_others():
    ranking = ranked([node(f"n{at:03}") for at in range(100)])
    excluded = {f"n{at:03}" for at in range(98)}

    assert set(ranking.cheapest(WORK, 16, excluded.__contains__)) == {"n098", "n099"}


@pytest.mark.parametrize("seed", range(5))
def test_rows_of_departed_nodes_are_removed(seed):
    draw = random.Random(seed)
    nodes = random_nodes(seed, 90)
    ranking = ranked(random_nodes(seed + 1, 90))
    for each in nodes:
        ranking.put(each)
    gone = draw.sample(nodes, 60)
    for each in gone:
        ranking.drop(each.name)
        ranking.drop(each.name)
    left = [each for each in nodes if each not in gone]
    fresh = ranked(left)

    assert len(ranking) == 30
    assert set(ranking.cheapest(WORK, 99, no_node)) == {each.name for each in left}
    assert ranking.totals.agents == sum(each.agents for each in left)
    assert ranking.totals.prefill_mean == pytest.approx(fresh.totals.prefill_mean)
    assert ranking.totals.prefill_median == fresh.totals.prefill_median
    assert ranking.totals.decode_mean == pytest.approx(fresh.totals.decode_mean)
    assert {ranking.homes(f"s{at}", 1, no_node)[0] for at in range(99)} <= by_name(left).keys()


def test_homes_are_stable_while_their_nodes_remain():
    nodes = [node(f"n{at:03}") for at in range(100)]
    ranking = ranked(nodes)
    before = {seed: ranking.homes(seed, 2, no_node) for seed in map(str, range(200))}
    ranking.drop("n007")

    for seed, homes in before.items():
        assert len(set(homes)) == 2
        if "n007" not in homes:
            assert ranking.homes(seed, 2, no_node) == homes
    assert len({homes[0] for homes in before.values()}) > 60, "spread over the nodes"

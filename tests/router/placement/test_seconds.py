from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.placement.choice import Policy, choose
from router.placement.decision import How
from router.placement.load_ledger import Ledger
from router.placement.seconds import (
    Job,
    NodeCandidate,
    Option,
    assumed_rates,
    terms_of,
    with_shares,
)

RATES = st.floats(1.0, 5000.0)
NODES = st.lists(
    st.builds(
        NodeCandidate,
        name=st.sampled_from([f"n{i}" for i in range(8)]),
        prefill_tokens_per_s=RATES,
        decode_tokens_per_s=st.floats(0.0, 200.0),
        queue_s=st.floats(0.0, 100.0),
        active=st.integers(0, 32),
        cached_tokens=st.integers(0, 100_000),
        load_s=st.floats(0.0, 20.0),
        held_tokens=st.integers(0, 1000),
        cold_order=st.integers(0, 5),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda node: node.name,
)
JOBS = st.builds(
    Job,
    prompt_tokens=st.integers(1, 100_000),
    completion_tokens_max=st.integers(1, 4096),
)
HOMES = st.none() | st.sampled_from([f"n{i}" for i in range(9)])


def cost_s(job, node):
    return terms_of(job, node).total_s


def place(job, nodes, policy=Policy.SECONDS, home=None):
    """Return the node on which a turn starts."""
    options = [Option(How.LOAD, node, terms_of(job, node)) for node in nodes]
    return choose(options, home, policy).node


@given(JOBS, NODES, st.sampled_from(Policy), HOMES, st.randoms())
def test_placement_ignores_node_order(job, nodes, policy, home, random):
    shuffled = nodes[:]
    random.shuffle(shuffled)

    assert place(job, nodes, policy, home) == place(job, shuffled, policy, home)


@given(JOBS, NODES)
def test_chosen_cost_is_near_the_best(job, nodes):
    best_s = min(cost_s(job, node) for node in nodes)
    chosen = place(job, nodes)

    assert cost_s(job, chosen) <= best_s + max(0.15, 0.1 * best_s) + 1e-9


@given(JOBS, NODES, st.integers(1, 50_000), st.floats(0.001, 50.0))
def test_cost_is_monotonic_in_its_inputs(job, nodes, tokens, seconds):
    node = nodes[0]
    plain = cost_s(job, node)

    assert cost_s(job, replace(node, cached_tokens=node.cached_tokens + tokens)) <= plain + 1e-9
    assert cost_s(job, replace(node, prefill_tokens_per_s=node.prefill_tokens_per_s * 2)) <= (
        plain + 1e-9
    )
    assert cost_s(job, replace(node, queue_s=node.queue_s + seconds)) >= plain - 1e-9
    assert cost_s(job, replace(node, active=node.active + 1)) >= plain - 1e-9
    assert cost_s(replace(job, prompt_tokens=job.prompt_tokens + tokens), node) >= plain - 1e-9
    assert plain >= min(node.queue_s, 0.5)


@given(JOBS, NODES)
def test_home_wins_only_within_margin(job, nodes):
    at_home = place(job, nodes, home=nodes[0].name)
    costs = {node.name: cost_s(job, node) for node in nodes}
    best_s = min(costs.values())
    near = costs[nodes[0].name] <= best_s + max(0.15, 0.1 * best_s)

    assert (at_home.name == nodes[0].name) or not near


def node(name, rate=1000.0, **fields):
    return NodeCandidate(name, rate, **fields)


def test_faster_node_gets_long_cold_prompt():
    chosen = place(Job(10_000, 16), [node("mini", 300.0), node("studio", 1200.0)])

    assert chosen.name == "studio"


def test_slow_node_with_cached_prefix_beats_fast_cold_node():
    mini = node("mini", 300.0, cached_tokens=9_900)

    assert place(Job(10_000, 16), [mini, node("studio", 1200.0)]).name == "mini"


def test_long_queue_outweighs_cached_prefix():
    busy = node("mini", cached_tokens=9_000, queue_s=60.0)

    assert place(Job(10_000, 16), [busy, node("studio")], home="mini").name == "studio"


def test_disk_load_is_skipped_when_prefill_is_faster():
    slow_disk = node("a", cached_tokens=1000, load_s=99.0)

    assert cost_s(Job(1000, 16), slow_disk) == pytest.approx(1.0)


def test_equal_nodes_alternate():
    ledger = Ledger()
    seen = []
    for _ in range(6):
        nodes = [
            node(name, cold_order=ledger.cold_order(name), turn_order=ledger.turn_order(name))
            for name in "abc"
        ]
        chosen = place(Job(100, 16), nodes)
        seen.append(chosen.name)
        ledger.begin(chosen.name, 0.0, cold=True)

    assert seen == list("abcabc")


def test_baseline_policies_choose_by_load_or_turn_order():
    nodes = [
        node("a", queue_s=1.0, cached_tokens=9_999, turn_order=1),
        node("b", turn_order=3),
        node("c", queue_s=2.0, turn_order=2),
    ]

    assert place(Job(10_000, 16), nodes, Policy.LEAST_LOAD).name == "b"
    assert place(Job(10_000, 16), nodes, Policy.ROUND_ROBIN).name == "a"


def test_ledger_counts_prefill_until_first_token_and_turn_until_end():
    ledger = Ledger()
    one = ledger.begin("a", 2.0, cold=True)
    two = ledger.begin("a", 3.0, cold=False)

    assert (ledger.prefill_s("a"), ledger.turns("a")) == (5.0, 2)
    ledger.rebook(one, 1_500, 1_000.0)
    assert ledger.prefill_s("a") == 4.5
    ledger.end_prefill(one)
    ledger.end_prefill(one)
    assert (ledger.prefill_s("a"), ledger.turns("a")) == (3.0, 2)
    for _ in range(2):
        ledger.end(one)
        ledger.end(two)
    assert (ledger.prefill_s("a"), ledger.turns("a")) == (0.0, 0)


def test_unmeasured_node_is_assumed_average():
    assert assumed_rates([1200.0, 0.0, 600.0], 300.0) == [1200.0, 900.0, 600.0]
    assert assumed_rates([0.0, 0.0], 300.0) == [300.0, 300.0]


def test_node_share_follows_count_and_speed_class():
    def full(kept=None, **agents):
        rates = {"slow": 200.0, "usual": 1000.0, "noisy": 1500.0, "fast": 4000.0}
        nodes = [node(name, rates[name], agents=count) for name, count in agents.items()]
        return {each.name for each in with_shares(nodes, kept) if each.over_share}

    assert full(usual=0, noisy=0) == set()
    assert full(usual=1, noisy=0) == {"usual"}
    assert full(usual=9, noisy=8) == set(), "either may get the next agent"
    assert full(usual=10, noisy=7) == {"usual"}, "a speed of the same class gives no larger share"
    assert full(usual=10, noisy=7, kept="usual") == set()
    assert full(usual=8, fast=25) == set(), "three times as fast: three times as many"
    assert full(usual=10, fast=80) == {"fast"}
    assert full(slow=3, usual=10, noisy=10) == set()
    assert full(slow=6, usual=10, noisy=10) == {"slow"}


def test_node_over_its_share_is_used_when_others_are_busier():
    warm = node("a", cached_tokens=4_000, agents=9)

    def chosen(queue_s):
        others = [node("b", queue_s=queue_s), node("c", queue_s=queue_s)]
        return place(Job(4_000, 16), with_shares([warm, *others], None)).name

    assert chosen(0.0) == "b", "otherwise all agents with its prefix would follow it"
    assert chosen(30.0) == "a"


def test_long_prompts_delay_each_other_by_the_shorter_one():
    job = Job(2_000, 16)
    queued = {"queue_s": 33.0, "prompts_s": (30.0, 1.0, 2.0)}

    known = terms_of(job, node("a", **queued))
    assert known.queue_s == pytest.approx(2.0 + 1.0 + 2.0)
    assert known.delay_s == pytest.approx(2.0 + 1.0 + 2.0)
    unknown = terms_of(job, node("a", queue_s=43.0, prompts_s=(30.0, 1.0, 2.0)))
    assert unknown.queue_s == pytest.approx(5.0 + 10.0), "another router's queue counts in full"
    assert unknown.delay_s == pytest.approx(5.0 + 2.0)


def test_short_prompt_waits_for_a_chunk_and_for_short_ones():
    job = Job(10_000, 16)
    warm = {"cached_tokens": 9_800, "queue_s": 30.4}

    queued = terms_of(job, node("a", prompts_s=(30.0, 0.4), **warm))
    assert queued.queue_s == pytest.approx(0.9)
    almost_free = terms_of(job, node("a", cached_tokens=9_800, queue_s=0.1))
    assert almost_free.queue_s == pytest.approx(0.1)


def test_terms_add_up_to_the_compared_cost():
    job = Job(4_000, 100)
    busy = node(
        "a",
        decode_tokens_per_s=50.0,
        cached_tokens=2_000,
        load_s=0.5,
        queue_s=3.0,
        prompts_s=(3.0,),
        active=1,
        evict_s=0.25,
        slowness=1.5,
    )
    terms = replace(terms_of(job, busy, price_s=0.3), bring_s=1.0)

    assert (terms.queue_s, terms.bring_s, terms.load_s, terms.prefill_s) == (2.0, 1.0, 0.5, 2.0)
    assert terms.first_token_s == 5.5
    assert terms.risk_s == pytest.approx(0.5 * (2.0 + terms.answer_s))
    assert terms.felt_s == pytest.approx(5.5 + 2.0 + 0.25 + terms.risk_s)
    assert terms.total_s == pytest.approx(terms.felt_s + 0.25 * terms.answer_s + 0.3)


def test_memory_travels_while_the_queue_gets_shorter():
    job = Job(4_000, 16)
    queued = node("a", cached_tokens=2_000, queue_s=3.0, prompts_s=(3.0,))

    assert terms_of(job, queued).first_token_s == pytest.approx(4.0)
    for travel_s, left_s in ((1.0, 2.0), (2.0, 1.0), (3.0, 0.0), (5.0, 0.0)):
        terms = terms_of(job, queued, travel_s=travel_s)
        assert (terms.bring_s, terms.queue_s) == (travel_s, pytest.approx(left_s))
        assert terms.first_token_s == pytest.approx(travel_s + left_s + 2.0)


@given(JOBS, NODES)
def test_no_term_is_negative(job, nodes):
    for each in nodes:
        assert min(astuple(terms_of(job, each))) >= 0.0


def test_number_of_agents_counts_little_while_turns_run():
    warm = node("a", cached_tokens=3_900, agents=9)
    nodes = with_shares([warm, node("b"), node("c")], None)

    assert place(Job(4_000, 16), nodes).name == "b"
    assert place(Job(4_000, 16, is_calm=False), nodes).name == "a"

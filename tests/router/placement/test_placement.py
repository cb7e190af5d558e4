"""Placement as a table of snapshots and chosen nodes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.control.node_calls import DRAINING, TierBytes
from fabric.errors import RetryLaterError
from fabric.ids import NodeName
from router.placement.choice import Policy
from router.placement.decision import Decision, How, TurnFacts
from router.placement.load_ledger import Ledger
from router.placement.placement import Placement, recompute_s
from router.placement.sketch_index import HeadState
from router.placement.snapshot import HolderRole, PrefixHolder
from tests.router.placement.snapshots import fleet, holder, node

NAMED = TurnFacts("m", 4_000, 16, "t:alice", agent="alice")
UNNAMED = TurnFacts("m", 4_000, 16, "t:7")
GROUPED = replace(UNNAMED, group="team")
SUSPECT = {"is_alive": False}
EXPIRED = {"is_alive": False, "is_up": False}
RETURNING = EXPIRED | {"is_returning": True}
BUSY = {"promised_s": 600.0, "prompts_s": (20.0,) * 30, "turns": 30}
A, B = node("a"), node("b")
OWNER, COPY, ERASED = HolderRole.OWNER, HolderRole.COPY, HolderRole.ERASED
STARTING, RELEASED = HolderRole.STARTING, HolderRole.RELEASED


def prefix(name, share=1.0, agent="alice", **known):
    return PrefixHolder(NodeName(name), share, agent, **known)


def fleet_of(*nodes, holders=(), **held):
    return fleet(*nodes, holders=tuple(holder(*each) for each in holders), **held)


def stays(decision, name):
    return decision.how is How.STAY and decision.node == name


STAYS = {
    "its owner": fleet_of(A, B, holders=[("b", OWNER)]),
    "its owner, however long the queue": fleet_of(A, node("b", known=BUSY), holders=[("b", OWNER)]),
    "its owner, however slow": fleet_of(A, node("b", prefill=1.0), holders=[("b", OWNER)]),
    "its owner, though a copy is quicker": fleet_of(
        A, node("b", known=BUSY), holders=[("b", OWNER), ("a", COPY)], prefixes=(prefix("a"),)
    ),
    "its owner, silent for a moment": fleet_of(A, node("b", known=SUSPECT), holders=[("b", OWNER)]),
    "its owner, starting again": fleet_of(A, node("b", known=RETURNING), holders=[("b", OWNER)]),
    "its owner, draining": fleet_of(A, node("b", state=DRAINING), holders=[("b", OWNER)]),
    "its owner, of whatever model": fleet_of(A, node("b", model="other"), holders=[("b", OWNER)]),
    "where it is just started": fleet_of(A, B, holders=[("b", STARTING), ("a", OWNER)]),
    "its owner, where the node of its start died": fleet_of(
        node("a", known=EXPIRED), B, holders=[("a", STARTING), ("b", OWNER)]
    ),
    "who gave it up": fleet_of(A, B, holders=[("b", RELEASED), ("a", COPY)]),
}


@pytest.mark.parametrize("case", STAYS)
def test_named_agent_stays_on(case):
    assert stays(Placement().decide(NAMED, STAYS[case]), "b")


@pytest.mark.parametrize("policy", Policy)
def test_no_policy_moves_agent_with_running_turns(policy):
    for snapshot in STAYS.values():
        assert stays(Placement(policy).decide(NAMED, snapshot), "b")


BEGINS = {
    "on the quicker node, as no node has it": (
        fleet_of(node("a", prefill=300.0), B),
        How.RECOMPUTE,
    ),
    "with a copy, as its owner is dead": (
        fleet_of(
            A,
            node("b", prefill=900.0),
            node("c", known=EXPIRED),
            holders=[("c", OWNER), ("b", COPY)],
            prefixes=(prefix("b", is_resident=True), prefix("c")),
        ),
        How.LOAD,
    ),
    "with the copy of a node that drains": (
        fleet_of(node("b", state=DRAINING), holders=[("b", COPY)], prefixes=(prefix("b"),)),
        How.LOAD,
    ),
    "on no node that drains": (fleet_of(node("a", state=DRAINING), B), How.RECOMPUTE),
    "on no node that dies": (fleet_of(node("a", known=SUSPECT), B), How.RECOMPUTE),
    "on no node that starts again": (fleet_of(node("a", known=RETURNING), B), How.RECOMPUTE),
    "on no node of another model": (fleet_of(node("a", model="other"), B), How.RECOMPUTE),
    "where no erasure is due": (fleet_of(A, B, holders=[("a", ERASED)]), How.RECOMPUTE),
    "not where it was tried": (fleet_of(node("tried", prefill=9e9), B), How.RECOMPUTE),
    "with what begins alike": (fleet_of(A, B, prefixes=(prefix("b", 0.5, None),)), How.LOAD),
    "anew, as less than a block begins alike": (
        fleet_of(node("a", prefill=300.0), B, prefixes=(prefix("b", 0.05, "bob"),)),
        How.RECOMPUTE,
    ),
    "anew, as others have what there is": (
        fleet_of(A, node("b", known={"agents": 1}), node("c", known={"agents": 9}, prefill=999.0)),
        None,
    ),
}


@pytest.mark.parametrize("case", BEGINS)
def test_named_agent_starts(case):
    snapshot, kind = BEGINS[case]
    tried = replace(NAMED, given_up=frozenset({NodeName("tried")}))
    decision = Placement().decide(tried, snapshot)

    assert decision.node == ("b" if kind else "a")
    assert decision.how is (kind or How.RECOMPUTE)
    assert decision.terms.prefill_s == pytest.approx(expected_s(decision, snapshot))


def expected_s(decision, snapshot):
    shares = {each.node: each for each in snapshot.prefixes}
    held = shares.get(decision.node)
    cached = 0 if held is None or held.share < 0.06 else held.share * 4_000
    cached -= cached % 256 if held and held.agent != "alice" else 0
    return (4_000 - cached) / snapshot.nodes[decision.node].view.prefill_tokens_per_s


@pytest.mark.parametrize("turn", [NAMED, UNNAMED, GROUPED])
def test_turn_is_rejected_with_retry_when_no_node_is_ready(turn):
    for snapshot in (
        fleet_of(),
        fleet_of(node("a", known=SUSPECT)),
        fleet_of(node("a", model="other")),
    ):
        with pytest.raises(RetryLaterError) as caught:
            Placement().decide(turn, snapshot)
        assert caught.value.code == "no_node_ready"


def test_resident_prefix_is_preferred_over_prefix_on_disk():
    nodes = (node("a", bytes_per_token=1 << 20), node("b", bytes_per_token=1 << 20))
    prefixes = (prefix("a", 0.9), prefix("b", 0.8, is_resident=True))

    assert Placement().decide(NAMED, fleet_of(*nodes, prefixes=prefixes)).node == "b"


def test_longer_prefix_on_a_disk_that_proved_slow_is_avoided():
    sized = {"bytes_per_token": 1 << 20}
    slow, fast = node("a", restore_bytes_per_s=1e8, **sized), node("b", **sized)
    prefixes = prefix("a", 0.9), prefix("b", 0.8)

    assert (
        Placement().decide(NAMED, fleet_of(node("a", **sized), fast, prefixes=prefixes)).node == "a"
    )
    assert Placement().decide(NAMED, fleet_of(slow, fast, prefixes=prefixes)).node == "b"


def test_turn_that_excludes_its_owner_goes_to_another_node():
    snapshot = STAYS["its owner"]

    assert Placement().decide(replace(NAMED, given_up=frozenset("b")), snapshot).node == "a"


def test_unnamed_turn_goes_to_owner_of_its_conversation():
    busy = node("b", known=BUSY)
    lives = fleet_of(A, busy, prefixes=(prefix("b", 0.9), prefix("a", 0.5, None)))
    copied = fleet_of(A, busy, prefixes=(prefix("b", 0.9, is_replica=True),))
    dead = fleet_of(A, node("b", known=EXPIRED), prefixes=(prefix("b", 0.9),))

    assert stays(Placement().decide(UNNAMED, lives), "b")
    assert Placement().decide(UNNAMED, copied) == Decision(How.RECOMPUTE, "a")
    assert Placement().decide(UNNAMED, dead) == Decision(How.RECOMPUTE, "a")
    for policy in set(Policy) - {Policy.SECONDS}:
        assert Placement(policy).decide(UNNAMED, lives) == Decision(How.LOAD, "a"), "a baseline"


def test_unknown_conversation_hashes_to_a_stable_home():
    def homes(seeds, *nodes, turn=UNNAMED, **held):
        turns = [replace(turn, home_seed=seed) for seed in seeds]
        return [Placement().decide(each, fleet(*nodes, **held)).node for each in turns]

    seeds = [f"t:{i}" for i in range(40)]
    many = homes(seeds, A, B, node("c"))
    fewer = homes(seeds, A, B)

    assert set(many) == {"a", "b", "c"}
    assert all(now == then for now, then in zip(fewer, many, strict=True) if then != "c")
    assert set(homes(seeds, A, B, turn=GROUPED, group_nodes=("b",))) == {"b"}
    known = (prefix("a", 0.05, "bob", group="another", is_replica=True),)
    assert set(homes(seeds, A, B, turn=GROUPED, group_nodes=("b",), prefixes=known)) == {"b"}
    known = (prefix("a", 0.05, "bob", group="team", is_replica=True),)
    assert set(homes(seeds, A, B, turn=GROUPED, group_nodes=("b",), prefixes=known)) == {"a"}


def test_recompute_time_is_that_of_fastest_other_node():
    nodes = (node("a", prefill=4000.0), node("b", prefill=500.0), node("c", prefill=9e9))
    dead = replace(nodes[2], is_alive=False)

    assert recompute_s(replace(NAMED, given_up=frozenset("a")), fleet(*nodes[:2], dead)) == 8.0
    assert recompute_s(NAMED, fleet(dead)) == float("inf")


def test_recompute_time_includes_the_queue_ahead():
    busy, slow = node("a", prefill=4000.0), node("b", prefill=500.0)
    busy = replace(busy, promised_s=3.0)

    assert recompute_s(NAMED, fleet(busy, slow)) == 4.0
    assert recompute_s(NAMED, fleet(replace(busy, promised_s=60.0), slow)) == 8.0


KNOWN = st.sampled_from([{}, SUSPECT, EXPIRED, RETURNING, BUSY])
NODES = st.lists(
    st.builds(
        lambda name, known, prefill, state: node(name, known=known, prefill=prefill, state=state),
        st.sampled_from("abcdef"),
        KNOWN,
        st.sampled_from([0.0, 300.0, 1200.0]),
        st.sampled_from(["ready", "ready", DRAINING]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.name,
)
HOLDERS = st.lists(
    st.builds(holder, st.sampled_from("abcdefg"), st.sampled_from(HolderRole)), max_size=4
)
PREFIXES = st.lists(
    st.builds(
        prefix,
        st.sampled_from("abcdef"),
        st.floats(0.01, 1.0),
        st.sampled_from([None, "alice", "bob"]),
        is_replica=st.booleans(),
        is_resident=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda each: each.node,
)
TURNS = st.sampled_from([NAMED, UNNAMED, GROUPED])
TRIED = st.frozensets(st.sampled_from("abcdef"), max_size=2)


@given(NODES, HOLDERS, PREFIXES, TURNS, TRIED, st.sampled_from(Policy), st.randoms())
def test_decision_is_deterministic_and_valid_for_any_fleet(
    nodes, holders, prefixes, turn, tried, policy, random
):
    turn = replace(turn, given_up=tried)
    held = {"holders": tuple(holders), "prefixes": tuple(prefixes)}

    def decide():
        random.shuffle(nodes)
        try:
            return Placement(policy).decide(turn, fleet(*nodes, **held))
        except RetryLaterError:
            return None

    decision = decide()
    assert decision == decide(), "the order of the nodes does not matter"
    if decision is None:
        return
    chosen = next(each for each in nodes if each.name == decision.node)
    assert decision.node not in tried
    assert chosen.is_up or chosen.is_returning
    if decision.how is not How.STAY:
        assert chosen.is_alive
        assert decision.terms.prefill_s >= 0.0
        erased = {each.node for each in holders if each.role is ERASED}
        assert turn.agent is None or decision.node not in erased


@pytest.mark.parametrize("policy", Policy)
def test_simulated_agents_stay_spread_and_avoid_dead_nodes(policy):
    """Place many turns on unequal nodes, one of which dies, by the router's own object."""
    placement, ledger = Placement(policy), Ledger()
    speeds = {"mini": 600.0, "pro": 900.0, "max": 900.0, "studio": 1500.0}
    lives: dict[str, str] = {}
    moved = 0

    def snapshot(agent, dead):
        agents = list(lives.values())
        nodes = [
            node(
                name,
                prefill=speed,
                known={
                    "agents": agents.count(name),
                    "cold_order": ledger.cold_order(name),
                    "turn_order": ledger.turn_order(name),
                }
                | (EXPIRED if name in dead else {}),
            )
            for name, speed in speeds.items()
        ]
        owner = [holder(lives[agent])] if agent in lives else []
        return fleet(*nodes, holders=tuple(owner))

    for turn in range(600):
        dead = {"studio"} if turn >= 400 else set()
        agent = f"agent-{turn * 7 % 40}"
        decision = placement.decide(replace(NAMED, agent=agent), snapshot(agent, dead))
        ledger.end(ledger.begin(decision.node, 0.0, cold=decision.is_cold))
        home = lives.get(agent)
        assert (decision.how is How.STAY) == (home is not None and home not in dead)
        moved += home is not None and home != decision.node
        lives[agent] = decision.node
        if turn == 399:
            before = list(lives.values())

    counts = {name: before.count(name) for name in speeds}
    assert "studio" not in lives.values()
    assert moved == counts["studio"], "agents of other nodes stayed"
    if policy is Policy.SECONDS:
        assert counts["studio"] > counts["pro"] > counts["mini"]


HARDSHIPS = {
    "a hot machine": {"thermal_state": "serious"},
    "one that throttles": {"thermal_state": "critical"},
    "one that is short of memory": {"memory_pressure": "warning"},
    "one that swaps": {"memory_pressure": "critical"},
    "one whose memory is full of others' caches": {
        "free": TierBytes(0, 1 << 40),
        "bytes_per_token": 1 << 20,
    },
}


@pytest.mark.parametrize("why", HARDSHIPS)
def test_new_agent_avoids(why):
    """The other node is a little slower."""
    easy = node("b", prefill=990.0)

    for named in (NAMED, UNNAMED):
        troubled = fleet(node("a", **HARDSHIPS[why]), easy, home=NodeName("a"))
        assert Placement().decide(named, troubled).node == "b"
        decision = Placement().decide(named, fleet(node("a"), easy, home=NodeName("a")))
        assert decision.node == "a"
        assert decision.terms.first_token_s == pytest.approx(4.0)


def test_owner_in_trouble_serves_its_agent():
    for words in HARDSHIPS.values():
        snapshot = fleet_of(A, node("b", **words), holders=[("b", OWNER)])
        assert stays(Placement().decide(NAMED, snapshot), "b")


def test_beginning_that_is_being_computed_is_waited_for():
    """A short rest overtakes other prompts, but not the one that computes its prefix."""
    busy = node("a", known={"promised_s": 3.0, "prompts_s": (3.0,), "turns": 1})
    prefixes = (prefix("a", 0.96, None, state=HeadState.COMING),)
    decision = Placement().decide(NAMED, fleet_of(busy, prefixes=prefixes))

    assert decision.terms.queue_s == pytest.approx(3.0)
    stored = Placement().decide(NAMED, fleet_of(busy, prefixes=(prefix("a", 0.96, None),)))
    assert stored.terms.queue_s == pytest.approx(0.5)

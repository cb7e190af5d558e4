"""Moves of idle agents by placement: stay or move, compared in seconds."""

from dataclasses import replace
from random import Random

import pytest

from fabric.control.node_calls import DRAINING, AgentView, TierBytes
from fabric.ids import AgentId, NodeName, TenantId
from fabric.record.manifest import OwnerState
from router.fleet.agent_activity import AgentActivity
from router.placement.choice import Policy
from router.placement.decision import How, TurnFacts
from router.placement.placement import Placement
from router.placement.snapshot import HolderRole, PrefixHolder
from tests.router.placement.snapshots import fleet, holder, node
from tests.support.clocks import ManualClock

ALICE = AgentId("alice")
TURN = TurnFacts("m", 11_000, 16, "t:alice", agent=ALICE)
TOKENS = 9_500  # of the agent
LINK_BYTES_PER_S = 1e9 / 8  # assumed between nodes that have measured nothing
BUSY = {"promised_s": 20.0, "turns": 8}


def memory(size_bytes=95_000_000, tokens=TOKENS, tiers=("hot", "disk")):
    return AgentView(
        tenant=TenantId("t"),
        agent=ALICE,
        group=None,
        node=NodeName("a"),
        state=OwnerState.OWNED,
        epoch=1,
        revision=1,
        tokens=tokens,
        blocks=1,
        bytes=TierBytes(size_bytes, size_bytes),
        tiers=tiers,
        busy=False,
        created_s=0.0,
        used_s=0.0,
    )


def owned(*nodes, view=None, copy=None, **known):
    """Make a fleet in which node a owns an idle agent, and node b may have an older copy."""
    holders = [holder("a", HolderRole.OWNER, view or memory())]
    if copy is not None:
        holders.append(holder("b", HolderRole.COPY, copy))
    fields = {"agent": ALICE, "is_idle": True, "holders": tuple(holders)} | known
    return fleet(*nodes, **fields)


A, B = node("a"), node("b")
BUSY_A = node("a", known=BUSY)


def decide(snapshot, turn=TURN, policy=Policy.SECONDS):
    return Placement(policy).decide(turn, snapshot)


def test_agent_leaves_long_queue_for_idle_node():
    decision = decide(owned(BUSY_A, B))

    assert decision.how is How.MOVE
    assert decision.agent == ALICE
    assert decision.ship.source == "a"
    assert decision.node == "b"
    assert decision.terms.prefill_s == pytest.approx((11_000 - TOKENS) / 1_000)
    assert 18 < decision.gain_s < 22, "the queue, and the delay that this turn no longer causes"


def test_reported_queue_counts_and_shrinks_with_time():
    busy = node("a", known={"others_end_s": 120.0})

    assert decide(owned(busy, B, now_s=100.0)).how is How.MOVE
    assert decide(owned(busy, B, now_s=119.9)).how is How.STAY


def test_short_prompt_that_overtakes_the_queue_stays():
    """The rest of the prompt waits for a chunk of the queue, which costs less than the move."""
    large = memory(round(LINK_BYTES_PER_S / 2))
    short = replace(TURN, prompt_tokens=TOKENS + 100)

    assert decide(owned(BUSY_A, B, view=large), short).how is How.STAY
    assert decide(owned(BUSY_A, B, view=large)).how is How.MOVE


def test_agent_does_not_move_to_node_with_slow_decode():
    slow = owned(node("a", decode=60.0, known=BUSY), node("b", decode=0.5))

    assert decide(slow, replace(TURN, completion_tokens_max=256)).how is How.STAY


STAYS = {
    "equal nodes": owned(A, B),
    "a queue that is shorter than the price": owned(node("a", known={"promised_s": 0.3}), B),
    "speeds of one class": owned(node("a", prefill=900.0), node("b", prefill=1_100.0)),
    "a running turn": owned(BUSY_A, B, is_idle=False),
    "a busier target": owned(BUSY_A, node("b", known={"promised_s": 30.0})),
    "a target of another model's bits": owned(BUSY_A, node("b", fingerprint="g")),
    "a draining target": owned(BUSY_A, node("b", state=DRAINING)),
    "a degraded target": owned(BUSY_A, node("b", degraded="disk full")),
    "a target without room": owned(BUSY_A, node("b", free=TierBytes(1 << 40, 1_000))),
    "bytes that take longer than the queue": owned(
        BUSY_A, B, view=memory(round(25 * LINK_BYTES_PER_S))
    ),
    "an owner that is not answering": owned(node("a", known=BUSY | {"is_alive": False}), B),
    "an agent of unknown size": fleet(BUSY_A, B, holders=(holder("a"),), agent=ALICE, is_idle=True),
}


@pytest.mark.parametrize("why", STAYS)
def test_agent_stays_on_its_node(why):
    decision = decide(STAYS[why])

    assert decision.how is How.STAY
    assert decision.node == "a"


def test_moves_are_not_weighed_only_where_none_is_chosen():
    """The snapshot of a turn has no move targets until one of them might be better."""
    random, placement = Random(7), Placement()
    skipped = moved = 0
    for _ in range(2_000):
        queues_s = random.uniform(0.0, 0.6), random.choice((0.0, 0.2))
        a, b = (
            node(name, prefill=random.choice((300.0, 2_000.0)), known={"promised_s": queue_s})
            for name, queue_s in zip("ab", queues_s, strict=True)
        )
        view = memory(
            random.choice((1_000, 95_000_000)), tiers=random.choice((("hot",), ("disk",)))
        )
        turn = replace(TURN, prompt_tokens=TOKENS + random.randrange(600))
        alone = placement.decide(turn, owned(a, view=view, is_idle=False))
        decision = placement.decide(turn, owned(a, b, view=view))
        is_weighed = placement.weighs_moves(turn, alone)
        skipped += not is_weighed
        moved += decision.how is How.MOVE
        assert is_weighed or decision.how is How.STAY
    assert skipped > 100
    assert moved > 200


def test_moves_away_from_full_node_are_always_weighed():
    turn = replace(TURN, prompt_tokens=TOKENS, full=frozenset({NodeName("a")}))
    decision = decide(owned(A, is_idle=False), turn)

    assert Placement().weighs_moves(turn, decision)
    assert not Placement().weighs_moves(replace(turn, full=frozenset()), decision)
    assert Placement(Policy.ROUND_ROBIN).weighs_moves(replace(turn, full=frozenset()), decision)


def test_replica_makes_move_cheap():
    large = memory(round(25 * LINK_BYTES_PER_S))
    decision = decide(owned(BUSY_A, B, view=large, copy=large))

    assert decision.how is How.MOVE
    assert decision.ship.missing_bytes == 0


def test_transfer_overlaps_with_target_queue():
    view = memory(round(4 * LINK_BYTES_PER_S))
    idle = decide(owned(BUSY_A, B, view=view))
    queued = decide(owned(BUSY_A, node("b", known={"promised_s": 4.0}), view=view))

    assert queued.gain_s == pytest.approx(idle.gain_s, abs=0.5)


def test_much_faster_node_attracts_long_prompts():
    turn = replace(TURN, prompt_tokens=30_000)
    decision = decide(owned(node("a", prefill=300.0), node("b", prefill=2_000.0)), turn)

    assert decision.how is How.MOVE


def test_recently_moved_agent_needs_larger_gain():
    for queue_s, moves in ((0.5, False), (20.0, True)):
        nodes = node("a", known={"promised_s": queue_s}), B
        small = memory(1_000_000)
        assert decide(owned(*nodes, view=small)).how is How.MOVE
        assert (decide(owned(*nodes, view=small, moved_lately=True)).how is How.MOVE) is moves


def test_agent_found_by_content_moves_like_a_named_one():
    prefixes = (PrefixHolder(NodeName("a"), 0.95, ALICE, is_resident=True),)
    turn = replace(TURN, agent=None)
    decision = decide(owned(BUSY_A, B, prefixes=prefixes), turn)

    assert decision.how is How.MOVE
    assert decision.agent == ALICE


def test_baseline_policies_place_named_agents():
    idle_b = node("b", known={"turn_order": 1})
    for policy in (Policy.LEAST_LOAD, Policy.ROUND_ROBIN):
        snapshot = owned(node("a", known=BUSY | {"turn_order": 2}), idle_b)
        assert decide(snapshot, policy=policy).node == "b"
        assert (
            decide(owned(A, node("b", known=BUSY | {"turn_order": 2})), policy=policy).node == "a"
        )


def test_only_least_busy_nodes_of_large_fleet_are_compared():
    crowd = [node(f"n{at}", known={"promised_s": 60.0 + at}) for at in range(200)]
    decision = decide(owned(BUSY_A, *crowd, node("z")))

    assert decision.node == "z"


def test_frequent_moves_raise_the_price_of_the_next():
    turns, moved = 600, 0
    activity = AgentActivity(ManualClock())
    keys = [(TenantId("t"), AgentId(f"agent-{at}")) for at in range(turns)]
    for key in keys:
        queued = owned(node("a", known={"promised_s": 2.0}), B, move_price=activity.move_price)
        if decide(queued).how is How.MOVE:
            activity.note_move(key)
            moved += 1
        activity.begin_turn(key)

    assert 0.05 * turns < moved < 0.12 * turns, "each turn gains from a move"
    long = owned(node("a", known={"promised_s": 600.0}), B, move_price=activity.move_price)
    assert decide(long).how is How.MOVE, "a large gain is worth its price"

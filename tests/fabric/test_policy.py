"""Eviction from a full tier: budgets, floors, quotas, pins, sharing, and learned reuse."""

import random
from dataclasses import replace

import pytest

from fabric.errors import RejectedError
from fabric.retention import (
    Candidate,
    ReuseProbability,
    Rules,
    TenantShare,
    choose,
    tier_state,
)
from fabric.settings import parse_settings


def agent(name, size=10, idle=0.0, **more):
    """Make a candidate called tenant-number; `shared` are pieces that others have, too."""
    pieces = {name: size, **more.pop("shared", {})}
    values = {"reuse_probability": 0.5, "saves_s": float(size), **more}
    return Candidate((name.split("-")[0], name), pieces, idle, **values)


def names(choice):
    return [evicted.key[1] for evicted in choice.dropped]


def test_no_agent_is_evicted_while_the_budget_suffices():
    crowd = [agent(f"a-{i}", idle=i) for i in range(10)]
    choice = choose(crowd, 100, Rules(), free_share=0.5)
    assert (names(choice), choice.free_bytes) == ([], 0)


def test_least_valuable_agents_are_evicted_until_the_rest_fits():
    crowd = [agent(f"a-{i}", idle=10.0 * i) for i in range(10)]
    assert names(choose(crowd, 75, Rules())) == ["a-9", "a-8", "a-7"]
    assert names(choose(crowd, 75, Rules(), free_share=0.2)) == ["a-9", "a-8", "a-7", "a-6"]
    assert names(choose(crowd, 100, Rules(), incoming={"a": 5})) == ["a-9"]
    assert tier_state(crowd, 75, Rules()).free_bytes == -25


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ({"idle": 20.0}, {"idle": 10.0}),
        ({"reuse_probability": 0.1, "idle": 5.0}, {"reuse_probability": 0.9, "idle": 20.0}),
        ({"size": 20, "saves_s": 10.0}, {"size": 10, "saves_s": 10.0}),
        ({"saves_s": 1.0}, {"saves_s": 2.0}),
    ],
)
def test_eviction_prefers_the_worse_candidate(worse, better):
    crowd = [agent("a-worse", **worse), agent("a-better", **better)]
    assert names(choose(crowd, 21, Rules(), incoming={"a": 5})) == ["a-worse"]


def test_expired_agents_are_evicted_but_active_ones_are_not():
    crowd = [
        agent("a-old", idle=101),
        agent("a-young", idle=99),
        agent("a-busy", idle=500, is_active=True),
        agent("a-pinned", idle=500, is_pinned=True),
    ]
    assert names(choose(crowd, 1_000, Rules(ttl_s=100))) == ["a-old"]
    # A pin without a share of the budget has no effect.
    assert set(names(choose(crowd, 0, Rules(ttl_s=100)))) == {"a-old", "a-pinned", "a-young"}


def test_shared_bytes_count_once_and_stay_while_referenced():
    shared = {"prefix": 50}
    crowd = [agent(f"a-{i}", idle=10.0 * i, shared=shared) for i in range(3)]
    assert tier_state(crowd, 80, Rules()).free_bytes == 0
    choice = choose(crowd, 70, Rules())
    assert (names(choice), choice.free_bytes) == (["a-2"], 0)
    assert names(choose(crowd, 60, Rules())) == ["a-2", "a-1"]
    assert choose(crowd, 59, Rules()).free_bytes == 59


def test_flood_evicts_nothing_of_a_tenant_within_its_floor():
    quiet = [agent(f"b-{i}", idle=1_000.0 + i) for i in range(4)]
    flood = [agent(f"a-{i}", idle=float(i)) for i in range(50)]
    choice = choose([*quiet, *flood], 100, Rules())
    assert choice.free_bytes == 0
    assert {evicted.key[0] for evicted in choice.dropped} == {"a"}
    # Without floors, recency alone would have evicted exactly those.
    floors = {tenant: TenantShare(floor=0.0) for tenant in "ab"}
    unfair = choose([*quiet, *flood], 100, Rules(floors, rank=lambda candidate: -candidate.idle_s))
    assert {"b-0", "b-1", "b-2", "b-3"} <= set(names(unfair))


def test_active_agents_of_a_flood_do_not_evict_other_tenants():
    quiet = [agent(f"b-{i}", idle=1_000.0) for i in range(4)]
    flood = [agent(f"a-{i}", is_active=True) for i in range(8)]
    choice = choose([*quiet, *flood], 100, Rules())
    assert (names(choice), choice.free_bytes) == ([], -20)
    assert choice.quota_free_bytes["a"] >= choice.free_bytes


def test_agent_larger_than_its_tenant_floor_is_evicted():
    crowd = [agent("a-giant", size=60, idle=5), agent("b-1", size=45, idle=900)]
    assert names(choose(crowd, 100, Rules())) == ["a-giant"]


def test_configured_floors_and_quotas_apply():
    rules = Rules({"a": TenantShare(quota=0.3, floor=0.1), "b": TenantShare(floor=0.6)})
    assert rules.floors_bytes(["a", "b", "c", "d"], 100) == pytest.approx(
        {"a": 10, "b": 60, "c": 15, "d": 15}
    )
    crowd = [agent(f"a-{i}", idle=float(i)) for i in range(5)]
    choice = choose(crowd, 100, rules)
    assert names(choice) == ["a-4", "a-3"]
    assert choice.free_bytes == 70
    assert choice.quota_free_bytes["a"] == 0
    assert names(choose(crowd, 100, rules, incoming={"a": 10})) == ["a-4", "a-3", "a-2"]


def test_pinned_agents_are_evicted_last_within_their_share():
    crowd = [agent(f"a-{i}", idle=10.0 * i, is_pinned=i >= 4) for i in range(10)]
    choice = choose(crowd, 80, Rules())
    # Two of six pinned agents fit a quarter of 80; the others count as unpinned.
    assert choice.held == {("a", "a-4"), ("a", "a-5")}
    assert names(choice) == ["a-9", "a-8"]
    crowd = [agent("a-pin", is_pinned=True, idle=99), agent("a-1"), agent("a-2", is_active=True)]
    assert names(choose(crowd, 40, Rules(), incoming={"a": 15})) == ["a-1"]
    assert names(choose(crowd, 40, Rules(), incoming={"a": 25})) == ["a-1", "a-pin"]
    two = [agent(f"{t}-{i}", is_pinned=True) for t in "ab" for i in range(4)]
    assert len(tier_state(two, 80, Rules()).held) == 2


def test_spent_agents_are_evicted_first_even_if_pinned():
    spent = agent("a-spent", size=2, saves_s=1_000.0, is_pinned=True, is_spent=True)
    pinned = agent("a-pinned", size=2, idle=50.0, is_pinned=True)
    crowd = [spent, agent("a-idle", idle=100.0), pinned, agent("a-copy", is_replica=True)]
    assert names(choose(crowd, 13, Rules())) == ["a-copy", "a-spent"]
    assert choose(crowd, 99, Rules()).held == {pinned.key}


def test_random_evictions_respect_floors_quotas_and_activity():
    """Random tiers fit their budget unless active agents prevent it; floors and quotas hold."""
    rng = random.Random(7)
    for _ in range(300):
        tenants = "abc"[: rng.randrange(1, 4)]
        rules = Rules(
            {t: TenantShare(quota=rng.choice([0.4, 1.0])) for t in tenants if rng.random() < 0.3}
        )
        crowd = [
            agent(
                f"{rng.choice(tenants)}-{i}",
                size=rng.randrange(1, 30),
                idle=rng.random() * 100,
                is_active=rng.random() < 0.1,
                is_pinned=rng.random() < 0.2,
            )
            for i in range(rng.randrange(1, 40))
        ]
        budget = rng.randrange(10, 400)
        before, choice = tier_state(crowd, budget, rules), choose(crowd, budget, rules)
        evicted = {c.key for c in choice.dropped}
        remaining = [c for c in crowd if c.key not in evicted]
        after = tier_state(remaining, budget, rules)
        assert after.free_bytes == choice.free_bytes >= before.free_bytes
        assert not any(c.is_active for c in choice.dropped)
        floors = rules.floors_bytes({c.tenant for c in crowd}, budget)
        held = {t: sum(c.size_bytes for c in remaining if c.tenant == t) for t in floors}
        if choice.free_bytes < 0:
            assert all(c.is_active or held[c.tenant] <= floors[c.tenant] for c in remaining)
        for c in choice.dropped:
            had = sum(x.size_bytes for x in crowd if x.tenant == c.tenant)
            assert had > min(floors[c.tenant], rules.quota_bytes(c.tenant, budget))


def test_reuse_probability_is_learned_per_tenant_and_decays():
    reuse = ReuseProbability()
    assert reuse.probability("a", 1) == 0.5
    for _ in range(200):
        reuse.note("a", 1)  # one-shot requests
        reuse.note_all("b", 12)
    assert reuse.probability("a", 1) < 0.05
    assert reuse.probability("b", 1) > 0.95
    assert reuse.probability("c", 1) == 0.5
    for _ in range(5_000):
        reuse.note_all("a", 2)
    assert reuse.probability("a", 1) > 0.9


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"pin_share": 0.3}, "pin_share"),
        ({"tenants": {"a": {"quota": 0}}}, "tenants.a.quota"),
        ({"tenants": {"a": {"quota": 0.2, "floor": 0.3}}}, "tenants.a.floor"),
        ({"tenants": {"a": {"floor": 0.7}, "b": {"floor": 0.7}}}, "floors"),
        ({"tenants": {"a/b": {}}}, "tenant id"),
        ({"tenants": {"a": {"share": 1}}}, "share"),
    ],
)
def test_invalid_policy_settings_are_rejected(section, named):
    with pytest.raises(RejectedError, match=named):
        parse_settings({"node": section})


def test_valid_policy_settings_are_parsed():
    node = parse_settings({"node": {"tenants": {"a": {"quota": 1, "floor": 0.25}}}}).node
    assert node.rules.tenants == {"a": TenantShare(1.0, 0.25)}


def test_superseded_branches_of_a_pinned_agent_are_evicted_first():
    crowd = [
        agent("a-replica", is_replica=True, idle=50.0),
        agent("a-spent", is_spent=True, idle=50.0),
        agent("a-idle", idle=1000.0),
    ]
    kept = agent("a-kept", is_pinned=True)
    branches = replace(kept, pieces={"branch": 10}, is_pinned=False, is_superseded=True)
    crowd += [kept, branches]
    choice = choose(crowd, 45, Rules(pin_share=1.0))
    assert choice.dropped == (branches,)
    assert choice.held == {kept.key}
    assert names(choose(crowd, 35, Rules(pin_share=1.0))) == ["a-kept", "a-replica"]

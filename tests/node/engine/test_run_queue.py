"""Shares of the waiting queue: no tenant fills it, and a lone tenant gets most of it."""

from dataclasses import dataclass

import pytest

from fabric.turn.generation import Priority
from node.engine.run_queue import refusal
from node.engine.sequence import Ended
from tests.node.fake_engine import SchedulerRig, is_undisturbed, last_of

PLACES = 256


@dataclass(frozen=True)
class Waiting:
    tenant: str
    priority: Priority = Priority.INTERACTIVE


def flood(queued, tenant, priority=Priority.INTERACTIVE, places=PLACES, attempts_count=1_000):
    """Submit turns of a tenant; return how many were accepted."""
    before = len(queued)
    for _ in range(attempts_count):
        if refusal(queued, tenant, priority, places) is None:
            queued.append(Waiting(tenant, priority))
    return len(queued) - before


def test_sole_tenant_gets_most_of_the_queue():
    assert flood([], "bob") == 192


@pytest.mark.parametrize("places", [1, 2, 3, 4, 7, 256])
def test_queue_limit_holds_and_one_turn_may_always_wait(places):
    queued = []
    for tenant in ("a", "b", "c", "d"):
        assert flood(queued, tenant, places=places) >= (tenant == "a")
    assert len(queued) <= places


def test_other_tenants_are_admitted_during_a_flood():
    queued = []
    flood(queued, "bob")
    assert [flood(queued, name) for name in ("alice", "carol", "dave")] == [48, 12, 3]
    assert refusal(queued, "erin", Priority.INTERACTIVE, PLACES) is None


def test_only_the_tenant_over_its_share_is_refused():
    queued = []
    flood(queued, "bob")
    assert "of your requests" in refusal(queued, "bob", Priority.INTERACTIVE, PLACES)
    assert refusal(queued, "alice", Priority.INTERACTIVE, PLACES) is None


def test_background_share_is_bounded_and_split_between_tenants():
    queued = []
    assert flood(queued, "bob", Priority.BACKGROUND) == 96
    assert flood(queued, "alice", Priority.BACKGROUND) == 24
    assert flood(queued, "alice") > 60


def flooded_rig(long_prompts=40, slots=4):
    """Return a rig where bob has more long turns than slots, all waiting or running."""
    rig = SchedulerRig(active_max=slots, tokens_per_s=1_000)
    bobs = [rig.add(3_000, 400, seed=n, tenant="bob") for n in range(long_prompts)]
    rig.run(30)
    return rig, bobs


def test_tenant_is_answered_during_a_flood_of_long_turns():
    rig, bobs = flooded_rig()
    alice, events = rig.add(600, 5, seed=99, tenant="alice")
    before_s = rig.clock.now_s
    for _ in range(40):
        rig.run(1)
    last_of(events)
    assert is_undisturbed(alice, events)
    assert rig.clock.now_s - before_s < 30  # her prompt takes 0.6 s, and each of his chunks 0.5 s
    assert len(rig.queue.running) == 4
    rig.run(9_999)
    assert all(is_undisturbed(*bob) for bob in bobs[:4])


def test_tenants_share_slots_evenly_without_thrashing():
    rig, _ = flooded_rig(slots=6)
    for n in range(10):
        rig.add(3_000, 400, seed=200 + n, tenant="alice")
    active = []
    for _ in range(20):
        rig.run(1)
        active.append({id(sequence) for sequence in rig.queue.running})
    assert sorted(s.tenant for s in rig.queue.running) == ["alice"] * 3 + ["bob"] * 3
    assert len({frozenset(ids) for ids in active[-10:]}) == 1  # no sequence is paused repeatedly


def test_tenants_alternate_on_a_single_slot():
    """Otherwise a later tenant would wait for all earlier turns."""
    rig = SchedulerRig(active_max=1)
    bobs = [rig.add(100, 20, seed=n, tenant="bob") for n in range(12)]
    rig.run(3)
    ended = []
    for n in range(4):  # she sends a turn after each answer
        alice = rig.add(100, 20, seed=100 + n, tenant="alice")
        while not alice[1] or not isinstance(alice[1][-1], Ended):
            assert any(rig.queue)
            rig.run(1)
        assert is_undisturbed(*alice)
        ended.append(sum(isinstance(last_or_none(events), Ended) for _, events in bobs))
    assert ended == [1, 2, 3, 4]
    rig.run()
    assert all(is_undisturbed(*bob) for bob in bobs)


def last_or_none(events):
    return events[-1] if events else None


def test_turn_preempted_for_another_tenant_resumes_undisturbed():
    rig, bobs = flooded_rig(long_prompts=4)
    alices = [rig.add(2_000, 30, seed=300 + n, tenant="alice") for n in range(2)]
    rig.run(1)
    assert rig.queue.paused
    rig.run()
    assert all(is_undisturbed(*one) for one in [*bobs, *alices])


def test_prefill_alternates_between_tenants():
    rig = SchedulerRig(active_max=8, tokens_per_s=1_000)
    for n in range(3):
        rig.add(20_000, 400, seed=n, tenant="bob")
    rig.run(3)
    alice, _ = rig.add(20_000, 5, seed=77, tenant="alice")
    rig.engine.log.clear()
    rig.run(12)
    chunks = [cache for what, cache, *_ in rig.engine.log if what == "prefill"]
    assert 5 <= sum(cache is alice.cache for cache in chunks) <= 7


def test_background_does_not_preempt_interactive_of_another_tenant():
    rig, _ = flooded_rig(long_prompts=4)
    rig.add(100, 5, seed=5, tenant="alice", priority=Priority.BACKGROUND)
    rig.run(5)
    assert not rig.queue.paused
    assert [s.tenant for s in rig.queue.waiting] == ["alice"]

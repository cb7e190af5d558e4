"""Shared prompt heads: which sequence leads, which follow, how long and how urgently."""

import pytest

from fabric.ids import BlockHash
from fabric.limits import BLOCK_TOKENS
from fabric.turn.generation import Priority
from node.engine.sequence import Awaited, Head, Started
from node.limits import HEAD_WAIT_EXTRA_S, HEAD_WAIT_FACTOR
from tests.node.fake_engine import TOKEN_BYTES, SchedulerRig, is_undisturbed

PROMPT = 5_000
SHARED = 4_000
BLOCKS = PROMPT // BLOCK_TOKENS
BACKGROUND = {"priority": Priority.BACKGROUND}


def head(number, *, shared=SHARED, salt="tenant", **options):
    """Return the head of a prompt whose first `shared` tokens all prompts share."""
    ids = [at if at < shared else number * 10_000 + at for at in range(PROMPT)]
    names = tuple(
        BlockHash(f"{salt} {ids[: (at + 1) * BLOCK_TOKENS]}".encode()) for at in range(BLOCKS)
    )
    return Head(ids, names, **{"leads": True, "waits": True, **options})


def add(rig, number, *, tokens=PROMPT, priority=Priority.INTERACTIVE, **options):
    """Submit a prompt with a shared head."""
    request = {"seed": number, "priority": priority, "reserve_bytes": TOKEN_BYTES * tokens}
    return rig.add(tokens, 4, head=head(number, **options), **request)


def publish(sequence, tokens):
    """Record, as a turn does, how many tokens others can read."""
    sequence.head.published_tokens = tokens


def has_begun(events):
    return any(isinstance(event, Started) for event in events)


def test_followers_of_a_shared_head_wait_without_reserving_memory():
    rig = SchedulerRig(tokens_per_s=1_000.0)
    first, lead_events = add(rig, 1)
    others = [add(rig, number)[0] for number in (2, 3)]
    rig.run(3)
    assert rig.queue.running == [first]
    assert rig.budget.reserved_bytes == TOKEN_BYTES * PROMPT
    assert first.head.awaited_tokens == SHARED
    assert sum(isinstance(event, Awaited) for event in lead_events) == 1
    assert [other.queued_tokens for other in others] == [PROMPT - 1 - SHARED] * 2

    publish(first, SHARED - 300)
    rig.run(1)
    assert rig.queue.running == [first]
    publish(first, SHARED)
    rig.run(1)
    assert rig.queue.waiting == []
    assert all(other.head.has_grown for other in others)
    rig.run()


def test_sequences_with_different_heads_do_not_wait():
    rig = SchedulerRig()
    one = [add(rig, number, salt=f"tenant {number}")[0] for number in (1, 2)]
    alike = [add(rig, number, shared=200)[0] for number in (3, 4)]  # less than a block
    rig.run(1)
    assert rig.queue.waiting == []
    assert not any(sequence.head.awaited_tokens for sequence in (*one, *alike))
    rig.run()


@pytest.mark.parametrize("refuses", ["leads", "waits"])
def test_sequences_opting_out_neither_lead_nor_follow(refuses):
    rig = SchedulerRig()
    add(rig, 1, **({"leads": False} if refuses == "leads" else {}))
    other, _ = add(rig, 2, **({"waits": False} if refuses == "waits" else {}))
    rig.run(1)
    assert other in rig.queue.running
    rig.run()


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_follower_takes_the_lead_when_the_lead_ends(end):
    rig = SchedulerRig(active_max=2, tokens_per_s=1_000.0)
    first, _ = add(rig, 1, priority=Priority.BACKGROUND)
    others = [add(rig, number, priority=Priority.BACKGROUND) for number in (2, 3)]
    rig.run(3)
    computed = first.cache.tokens_count
    assert 0 < computed < SHARED
    if end == "cancelled":
        first.cancelled.set()
        rig.run(1)
        assert rig.queue.running == []  # its turn is about to save the computed tokens
        rig.scheduler.heads.end(first)
    else:
        first.cache.is_broken = True
    rig.run(2)
    second, third = (sequence for sequence, _ in others)
    assert second in rig.queue.running
    assert third in rig.queue.waiting
    assert second.head.awaited_tokens == SHARED
    rig.scheduler.heads.end(second)
    publish(second, SHARED)
    rig.run()
    assert all(is_undisturbed(sequence, events) for sequence, events in others)


def test_paused_lead_is_awaited_only_for_its_published_tokens():
    rig = SchedulerRig(active_max=1, tokens_per_s=1_000.0)
    first, _ = add(rig, 1, priority=Priority.BACKGROUND)
    second, _ = add(rig, 2, priority=Priority.BACKGROUND)
    rig.run(3)
    publish(first, first.cache.tokens_count)
    rig.add(50, 500, seed=9)
    rig.run(1)
    assert rig.queue.paused == [first]
    assert second.head.expected_tokens == 0
    publish(first, SHARED)
    rig.run()


def test_cancelled_lead_being_saved_is_awaited_for_its_computed_tokens():
    rig = SchedulerRig(tokens_per_s=1_000.0)
    first, _ = add(rig, 1)
    second, _ = add(rig, 2)
    rig.run(3)
    first.cancelled.set()
    rig.run(3)
    assert second in rig.queue.waiting
    assert second.head.expected_tokens == first.cache.tokens_count
    rig.scheduler.heads.end(first)
    rig.run(1)
    assert second in rig.queue.running
    rig.run()


def test_wait_for_a_lead_is_bounded_by_own_prefill_time():
    rig = SchedulerRig(tokens_per_s=1_000.0)
    first, _ = add(rig, 1)
    second, events = add(rig, 2)
    rig.run(2)
    first.is_blocked = lambda: True  # as when the disk does not keep up
    limit_s = HEAD_WAIT_EXTRA_S + HEAD_WAIT_FACTOR * SHARED / 1_000
    while second in rig.queue.waiting:
        assert rig.clock.now_s < limit_s + 2
        rig.clock.now_s += 0.5
        rig.run(1)
    assert rig.clock.now_s > limit_s - 1
    first.is_blocked = lambda: False
    rig.run()
    assert is_undisturbed(second, events)


def test_lead_inherits_urgency_of_its_followers():
    rig = SchedulerRig(active_max=2, tokens_per_s=1_000.0)
    slow, _ = add(rig, 1, priority=Priority.BACKGROUND)
    rig.run(1)
    foreign, events = add(rig, 2, salt="foreign")
    rig.run(1)
    at = slow.cache.tokens_count
    rig.run(1)
    assert slow.cache.tokens_count == at, "the lead waits behind an interactive one"
    urgent, _ = add(rig, 3)
    rig.run(3)
    assert slow.cache.tokens_count > at
    assert not has_begun(events)
    urgent.cancelled.set()
    rig.run(1)
    assert not slow.is_urgent
    assert foreign.is_urgent
    rig.run()


def test_recurrent_lead_stops_at_the_end_of_the_shared_head():
    rig = SchedulerRig(tokens_per_s=1_000.0)
    states = {"has_states": True, "shares_parts": False}
    first, _ = add(rig, 1, **states)
    second, _ = add(rig, 2, **states)
    rig.run(2)
    end = SHARED // BLOCK_TOKENS * BLOCK_TOKENS
    assert first.stops == (end,)
    while first.cache.tokens_count < end:
        rig.run(1)
    assert first.cache.tokens_count == end
    late, _ = add(rig, 3, shared=3_000, **states)
    rig.run(1)
    assert second in rig.queue.waiting
    assert late in rig.queue.running, "no state was kept where its head ends"
    publish(first, end)
    rig.run()


def test_short_shared_heads_are_not_awaited():
    rig = SchedulerRig()
    add(rig, 1)
    other, _ = add(rig, 2, stored_tokens=SHARED - 100)
    rig.run(1)
    assert other in rig.queue.running
    rig.run()

"""Who may begin while memory is short, over a fake engine whose caches grow by the token."""

import random

import pytest

from fabric.limits import ADMISSION_PASSES_MAX
from fabric.turn.generation import Priority
from tests.node.fake_engine import TOKEN_BYTES, SchedulerRig, is_undisturbed

BACKGROUND = {"priority": Priority.BACKGROUND}


def held_by(total):
    """Make a spill and a `granted` that take a cache out of memory and back."""
    away = {}

    def spill(sequence):
        away[sequence] = sequence.cache.tokens
        sequence.cache.tokens = []
        total.append(sequence)

    def granted(sequence):
        sequence.cache.tokens = away.pop(sequence, sequence.cache.tokens)

    return spill, granted


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spills", [False, True])
def test_memory_is_never_exceeded_and_everyone_gets_through(seed, spills):
    rng = random.Random(seed)
    spilled = []
    spill, granted = held_by(spilled)
    total_bytes = 2_000 * TOKEN_BYTES
    rig = SchedulerRig(active_max=4, total_bytes=total_bytes, spill=spill if spills else None)
    added = []
    for number in range(30):
        prompt, answer = rng.randrange(2, 1_500), rng.randrange(1, 30)
        priority = rng.choice(list(Priority))
        # One token behind the answer: the step that is one too many.
        sequence, events = rig.add(
            prompt, answer, seed=number, priority=priority,
            reserve_bytes=(prompt + answer + 1) * TOKEN_BYTES,
        )  # fmt: skip
        sequence.granted = lambda sequence=sequence: granted(sequence)
        added.append((sequence, events))
        for _ in range(rng.randrange(3)):
            rig.scheduler.iterate()
            used_bytes = sum(s.cache.size_bytes for s in rig.queue)
            assert used_bytes <= rig.budget.reserved_bytes <= total_bytes
            assert len(rig.queue.running) <= 4
    rig.run()

    assert all(is_undisturbed(*one) for one in added)
    assert rig.budget.reserved_bytes == 0
    assert spills or not spilled


def test_some_case_of_the_above_really_spills():
    spilled = []
    spill, granted = held_by(spilled)
    rig = SchedulerRig(total_bytes=1_000 * TOKEN_BYTES, spill=spill)
    low, low_events = rig.add(800, reserve_bytes=900 * TOKEN_BYTES, **BACKGROUND)
    low.granted = lambda: granted(low)
    rig.run(3)
    high, high_events = rig.add(500, seed=2, reserve_bytes=600 * TOKEN_BYTES)
    rig.run(1)

    assert spilled == [low]
    assert rig.queue.paused == [low]
    rig.run()
    assert is_undisturbed(low, low_events)
    assert is_undisturbed(high, high_events)


def test_a_big_request_is_overtaken_a_few_times_only():
    rig = SchedulerRig(total_bytes=1_000)
    rig.add(2, answer_tokens=40, reserve_bytes=500)
    rig.run(1)
    big, big_events = rig.add(2, seed=9, reserve_bytes=900)
    small = [rig.add(2, 2, seed=turn, reserve_bytes=100) for turn in range(20)]
    while big in rig.queue.waiting:
        overtook = [one for one, _ in small if one not in rig.queue.waiting]
        rig.run(1)
    rig.run()

    assert len(overtook) == ADMISSION_PASSES_MAX
    assert is_undisturbed(big, big_events)
    assert all(is_undisturbed(*one) for one in small)


def test_idle_caches_make_room_later_and_stubborn_ones_do_not_stop_the_only_request():
    asked = []
    rig = SchedulerRig(total_bytes=1_000, make_room=asked.append)
    rig.budget.set_idle(900)
    one, events = rig.add(2, reserve_bytes=400)
    rig.run(3)

    assert asked == [300]
    assert rig.queue.waiting == [one]
    rig.budget.set_idle(850)  # all that could be dropped
    rig.run()
    assert is_undisturbed(one, events)


def test_memory_of_a_turn_being_saved_is_waited_for():
    rig = SchedulerRig(total_bytes=1_000)
    saved, _ = rig.add(2, 2, reserve_bytes=700, owns_reservation=True)
    rig.run()
    late, events = rig.add(2, 2, reserve_bytes=400)
    rig.run(3)

    assert rig.queue.waiting == [late]
    saved.reservation.release()
    rig.run()
    assert is_undisturbed(late, events)


def test_what_a_waiting_cache_holds_already_counts():
    rig = SchedulerRig(active_max=1, total_bytes=1_000)
    rig.add(3)
    rig.add(90, seed=2, cached=80, reserve_bytes=950)

    assert rig.budget.reserved_bytes == 80 * TOKEN_BYTES

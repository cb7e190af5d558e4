"""Admission while memory is short, over a fake engine whose caches grow by the token."""

import random

import pytest

from fabric.turn.generation import Priority
from node.limits import ADMISSION_PASSES_MAX
from tests.node.fake_engine import TOKEN_BYTES, SchedulerRig, is_undisturbed, last_of

BACKGROUND = {"priority": Priority.BACKGROUND}


@pytest.mark.parametrize("seed", range(20))
def test_memory_budget_is_never_exceeded_and_every_request_completes(seed):
    rng = random.Random(seed)
    total_bytes = 2_000 * TOKEN_BYTES
    rig = SchedulerRig(active_max=4, total_bytes=total_bytes)
    added = []
    for number in range(30):
        prompt, answer = rng.randrange(2, 1_500), rng.randrange(1, 30)
        priority = rng.choice(list(Priority))
        # One token more than the answer, for the extra step after its end.
        sequence, events = rig.add(
            prompt, answer, seed=number, priority=priority,
            reserve_bytes=(prompt + answer + 1) * TOKEN_BYTES,
        )  # fmt: skip
        added.append((sequence, events))
        for _ in range(rng.randrange(3)):
            rig.scheduler.iterate()
            used_bytes = sum(s.cache.size_bytes for s in rig.queue)
            assert used_bytes <= rig.budget.reserved_bytes <= total_bytes
            assert len(rig.queue.running) <= 4
    rig.run()

    assert all(is_undisturbed(*one) for one in added)
    assert rig.budget.reserved_bytes == 0


def test_large_request_is_overtaken_a_bounded_number_of_times():
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


def test_sole_request_runs_even_if_idle_caches_cannot_all_be_dropped():
    room_requests = []
    rig = SchedulerRig(total_bytes=1_000, make_room=room_requests.append)
    rig.budget.set_idle(900)
    one, events = rig.add(2, reserve_bytes=400)
    rig.run(3)

    assert room_requests == [300]
    assert rig.queue.waiting == [one]
    rig.budget.set_idle(850)  # no more can be dropped
    rig.run()
    assert is_undisturbed(one, events)


def test_request_waits_for_reservation_of_turn_being_saved():
    rig = SchedulerRig(total_bytes=1_000)
    saved, _ = rig.add(2, 2, reserve_bytes=700, owns_reservation=True)
    rig.run()
    late, events = rig.add(2, 2, reserve_bytes=400)
    rig.run(3)

    assert rig.queue.waiting == [late]
    saved.reservation.release()
    rig.run()
    assert is_undisturbed(late, events)


def test_memory_held_by_waiting_cache_is_reserved():
    rig = SchedulerRig(active_max=1, total_bytes=1_000)
    rig.add(3)
    rig.add(90, seed=2, cached=80, reserve_bytes=950)

    assert rig.budget.reserved_bytes == 80 * TOKEN_BYTES


def test_one_turn_runs_over_budget_filled_by_waiting_caches():
    rig = SchedulerRig(total_bytes=1_000)
    hot = [
        rig.add(60, 2, seed=number, cached=50, reserve_bytes=900, is_preemptible=lambda: True)
        for number in range(4)
    ]
    (first, events), *others = hot
    rig.run()

    assert is_undisturbed(first, events)
    *kept, (_, evicted) = others  # the last is evicted; the first two fit beside the running turn
    assert all(is_undisturbed(*one) for one in kept)
    assert last_of(evicted).is_handover
    assert rig.budget.reserved_bytes == 0


def test_waiting_caches_that_fit_beside_the_first_are_kept_in_memory():
    rig = SchedulerRig(total_bytes=1_000)
    hot = [
        rig.add(60, 2, seed=number, cached=50, reserve_bytes=900, is_preemptible=lambda: True)
        for number in range(3)
    ]
    rig.run()

    assert all(is_undisturbed(*one) for one in hot)

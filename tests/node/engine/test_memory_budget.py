import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import RejectedError
from node.engine.memory_budget import MemoryBudget, Reservation


def test_request_larger_than_the_budget_is_refused_with_advice():
    budget = MemoryBudget(100)
    budget.check(100)

    with pytest.raises(RejectedError, match=r"node\.hot_bytes") as caught:
        budget.check(101)
    assert caught.value.code == "exceeds_memory"


def test_idle_caches_dropped_immediately_make_room():
    requests = []

    def drop(size_bytes):
        requests.append(size_bytes)
        budget.set_idle(budget.idle_bytes - size_bytes)

    budget = MemoryBudget(100, drop)
    budget.set_idle(80)
    one = Reservation(budget)

    assert one.grow(50)
    assert requests == [30]
    assert (budget.reserved_bytes, budget.idle_bytes) == (50, 50)
    assert one.grow(40)  # already reserved
    assert not Reservation(budget).grow(101)
    one.release()
    one.release()
    assert budget.reserved_bytes == 0


def test_idle_caches_dropped_later_by_another_thread_make_room():
    requests = []
    budget = MemoryBudget(100, requests.append)
    budget.set_idle(80)
    one = Reservation(budget)

    assert not one.grow(50)
    assert not one.grow(50)  # one request for room at a time
    assert requests == [30]
    owner = threading.Thread(target=budget.set_idle, args=(50,))
    owner.start()
    owner.join()
    assert one.grow(50)


@pytest.mark.parametrize("answers_at_once", [True, False])
def test_forced_growth_exceeds_idle_caches_after_one_request(answers_at_once):
    requests = []

    def refuse(size_bytes):
        requests.append(size_bytes)
        if answers_at_once:
            budget.set_idle(80)

    budget = MemoryBudget(100, refuse)
    budget.set_idle(80)
    one = Reservation(budget)

    if answers_at_once:
        assert not one.grow(50)
    else:
        assert not one.grow(50, force=True)
        budget.set_idle(80)
        assert requests == [30]
    assert one.grow(50, force=True)
    assert requests


def test_counted_memory_may_exceed_the_budget():
    budget = MemoryBudget(100)
    one, two = Reservation(budget), Reservation(budget)
    one.count(90)
    one.count(20)
    two.count(30)

    assert budget.reserved_bytes == 120
    assert budget.claimable_bytes == -20
    assert one.grow(90)  # already reserved
    assert not two.grow(31)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "release", "idle", "answer"]),
        st.integers(0, 3),
        st.integers(0, 130),
    ),
    max_size=40,
)


@given(STEPS)
def test_grants_never_exceed_the_total(steps):
    budget = MemoryBudget(100, lambda size_bytes: None)
    held = [Reservation(budget) for _ in range(4)]
    for what, which, size_bytes in steps:
        one = held[which]
        if what == "grow":
            before = one.size_bytes
            if one.grow(size_bytes):
                assert one.size_bytes == max(before, size_bytes)
                if size_bytes > before:
                    assert budget.reserved_bytes + budget.idle_bytes <= 100
            else:
                assert one.size_bytes == before
        elif what == "release":
            one.release()
        else:
            budget.set_idle(min(size_bytes, 100 - budget.reserved_bytes))
        assert budget.reserved_bytes == sum(each.size_bytes for each in held)


def test_claim_takes_free_memory_only_and_requests_no_room():
    budget = MemoryBudget(100, lambda size_bytes: pytest.fail("no room was requested"))
    budget.set_idle(30)
    one, other = Reservation(budget), Reservation(budget)
    assert one.claim(50)
    assert not other.claim(21)
    assert (other.size_bytes, budget.reserved_bytes) == (0, 50)
    assert one.claim(70)  # 20 more
    assert not one.claim(71)

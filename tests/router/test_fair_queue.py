"""Properties of the weighted fair queue: order, work, shares and no starvation."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fair_queue import FairQueue

TENANTS = ["a", "b", "c"]
COSTS = st.floats(0.1, 8.0)
WEIGHTS = st.fixed_dictionaries({tenant: st.floats(0.25, 4.0) for tenant in TENANTS})
PUTS = st.lists(st.tuples(st.sampled_from(TENANTS), COSTS), min_size=1, max_size=60)


def all_of(queue, may_go=lambda _: True):
    items = []
    while (item := queue.next(may_go)) is not None:
        items.append(item)
    return items


@given(PUTS, WEIGHTS)
def test_each_item_leaves_once_in_the_order_of_its_tenant(puts, weights):
    queue = FairQueue(weights.__getitem__)
    for number, (tenant, cost) in enumerate(puts):
        queue.put(tenant, (tenant, number), cost)
    items = all_of(queue)

    assert sorted(number for _, number in items) == list(range(len(puts)))
    for tenant in TENANTS:
        numbers = [number for owner, number in items if owner == tenant]
        assert numbers == sorted(numbers)
    assert not len(queue)


@given(PUTS, WEIGHTS)
def test_tenants_that_wait_get_work_by_weight(puts, weights):
    """The bound is one item of each tenant, as in start-time fair queueing."""
    queue, waiting, largest = FairQueue(weights.__getitem__), Counter(), Counter()
    for number, (tenant, cost) in enumerate(puts):
        queue.put(tenant, (tenant, cost, number), cost)
        waiting[tenant] += 1
        largest[tenant] = max(largest[tenant], cost)
    work = Counter()
    while len(+waiting) == len(largest):  # until a tenant has no items left
        tenant, cost, _ = queue.next()
        work[tenant] += cost / weights[tenant]
        waiting[tenant] -= 1
        for one in largest:
            for other in largest:
                apart = abs(work[one] - work[other])
                bound = largest[one] / weights[one] + largest[other] / weights[other]
                assert one == other or apart <= bound + 1e-6


@given(st.integers(1, 50), st.integers(1, 200), COSTS)
def test_a_flood_delays_another_tenant_by_one_item(before, flood, cost):
    queue = FairQueue()
    for number in range(before + flood):
        queue.put("flood", number, cost)
    for _ in range(before):
        queue.next()
    queue.put("other", "first", 1.0)

    assert "first" in [queue.next(), queue.next()]


@given(PUTS, st.data())
def test_removed_items_cost_nothing(puts, data):
    """Other items are served as if these had never been queued."""
    queue, without = FairQueue(), FairQueue()
    removed = data.draw(st.sets(st.integers(0, len(puts) - 1)))
    for number, (tenant, cost) in enumerate(puts):
        queue.put(tenant, number, cost)
        if number not in removed:
            without.put(tenant, number, cost)
    for number in removed:
        queue.remove(puts[number][0], number)

    assert Counter(all_of(queue)) == Counter(all_of(without))
    assert not len(queue)


def test_an_idle_tenant_saves_no_credit_and_a_busy_one_keeps_its_debt():
    queue = FairQueue()
    for number in range(10):
        queue.put("busy", f"busy-{number}", 1.0)
    assert [queue.next() for _ in range(4)] == [f"busy-{number}" for number in range(4)]
    for number in range(4):
        queue.put("late", f"late-{number}", 1.0)
    rest = all_of(queue)

    assert rest[:2] == ["late-0", "busy-4"]
    assert rest[1:7:2] == ["busy-4", "busy-5", "busy-6"], "not all of the late tenant's first"


def test_tenant_that_returns_after_each_item_still_pays():
    """A tenant with one item at a time gets its share, not every second turn."""
    queue = FairQueue({"small": 0.25, "large": 1.0}.__getitem__)
    for number in range(40):
        queue.put("large", number, 1.0)
    served = Counter()
    for _ in range(25):
        if not queue.items("small"):
            queue.put("small", "small", 1.0)
        served[queue.next() == "small"] += 1

    assert served[True] == 5


def test_a_tenant_that_may_not_go_is_passed_over_without_credit():
    queue = FairQueue()
    for number in range(8):
        queue.put("a", f"a{number}", 1.0)
        queue.put("b", f"b{number}", 1.0)
    assert all(queue.next(lambda tenant: tenant == "b")[0] == "b" for _ in range(5))

    assert queue.next(lambda _: False) is None
    following = [queue.next()[0] for _ in range(4)]
    assert Counter(following) == {"a": 2, "b": 2} or following.count("a") <= 3


@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_weights_are_shares_of_the_items_that_leave(weight):
    queue = FairQueue({"a": weight, "b": 1.0}.__getitem__)
    for number in range(100):
        queue.put("a", ("a", number), 1.0)
        queue.put("b", ("b", number), 1.0)
    served = Counter(queue.next()[0] for _ in range(40))

    assert abs(served["a"] / served["b"] - weight) < 0.4

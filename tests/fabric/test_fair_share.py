import random

import pytest

from fabric.fair_share import FairShare


def test_each_owner_may_take_half_of_the_remaining_share():
    share = FairShare(64)
    counts = []
    for owner in "abcd":
        count = 0
        while share.take(owner):
            count += 1
        counts.append(count)

    assert counts == [32, 16, 8, 4]
    for _ in range(32):
        share.give("a")
    assert all(share.take("b") for _ in range(4)), "a returned share was not available to others"


def test_three_owners_each_get_one_of_four_places():
    share = FairShare(4)
    assert [share.take(o) for o in "aaabbcc"] == [True, True, False, True, False, True, False]


def test_returned_share_is_forgotten_and_cannot_be_returned_twice():
    share = FairShare(10)
    assert share.take("a", 0)
    assert share.take("a", 3)
    share.give("a", 3)

    assert share._held == {}
    with pytest.raises(AssertionError):
        share.give("a", 1)


def test_total_held_stays_within_the_limit():
    rng = random.Random(5)
    share, held = FairShare(1000), dict.fromkeys("abcde", 0)
    for _ in range(5000):
        owner, amount = rng.choice("abcde"), rng.randint(1, 200)
        if rng.random() < 0.6:
            held[owner] += amount if share.take(owner, amount) else 0
        else:
            amount = min(amount, held[owner])
            share.give(owner, amount)
            held[owner] -= amount
        assert sum(held.values()) <= 1000
        assert share._total == sum(held.values())

import random

import pytest

from fabric.fair_share import FairShare


def test_one_alone_has_half_and_whoever_comes_finds_some():
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
    assert all(share.take("b") for _ in range(4)), "what one gives back, others may take"


def test_even_of_four_places_three_tenants_get_one():
    share = FairShare(4)
    assert [share.take(o) for o in "aaabbcc"] == [True, True, False, True, False, True, False]


def test_what_is_given_back_is_forgotten_and_no_more_can_be_given():
    share = FairShare(10)
    assert share.take("a", 0)
    assert share.take("a", 3)
    share.give("a", 3)

    assert share._held == {}
    with pytest.raises(AssertionError):
        share.give("a", 1)


def test_holds_stay_within_the_limit_in_any_order():
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

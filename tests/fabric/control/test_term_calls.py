"""A voter grants each term to one router, and no term during another router's lease."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.control.term_calls import Ballot, GrantTerm, TermView, parse_term
from fabric.errors import OldRouterError, RejectedError
from fabric.limits import TERM_LEASE_S, TERM_MAX


def grant(term, router="one", lease_s=3.0, **more):
    return GrantTerm(term, router, lease_s, **more)


def granted_after(ballot, call, now_s):
    granted = ballot.after(call, now_s)
    assert granted is not None, "granted"
    return granted


def test_term_is_granted_once_the_previous_lease_expires():
    held = granted_after(Ballot(), grant(4, url="http://one"), 10.0)
    assert held == Ballot(TermView(4, "one", "http://one"), 13.0)
    assert held.after(grant(5, "two"), 12.9) is None
    assert held.answer(12.0, granted=False).left_s == 1.0
    assert granted_after(held, grant(5, "two"), 13.0).granted == TermView(5, "two")


def test_lease_is_renewed_only_by_its_router_even_when_expired():
    held = granted_after(Ballot(), grant(4), 10.0)
    assert granted_after(held, grant(4), 12.0).until_s == 15.0
    assert granted_after(held, grant(4), 20.0).until_s == 23.0
    assert held.after(grant(4, "two"), 20.0) is None
    assert held.after(grant(3, "two"), 20.0) is None


def test_router_releases_its_term():
    released = granted_after(granted_after(Ballot(), grant(4), 10.0), grant(4, lease_s=0.0), 11.0)
    assert granted_after(released, grant(5, "two"), 11.0).granted.term == 5
    with pytest.raises(OldRouterError):
        released.check(4, 11.0)
    assert Ballot().after(grant(1, lease_s=0.0), 0.0) is None, "no term was held"


def test_calls_are_accepted_within_the_lease_of_their_term():
    Ballot().check(None, 0.0)
    held = granted_after(Ballot(), grant(4), 10.0)
    held.check(4, 12.9)
    for term, now_s in ((None, 12.0), (3, 12.0), (4, 13.0), (3, 99.0)):
        with pytest.raises(OldRouterError) as refused:
            held.check(term, now_s)
        assert (refused.value.status, refused.value.code) == (409, "old_router")


def test_calls_of_a_later_term_are_recognized():
    held = granted_after(Ballot(), grant(4), 10.0)
    assert held.is_later(6)
    assert not held.is_later(4)
    assert not held.is_later(None)
    proven = held.with_proven_term(6, 11.0)
    proven.check(6, 11.0)
    assert proven.after(grant(7, "two"), 11.0) is None, "its router may hold a lease"
    assert granted_after(proven, grant(6, "three"), 12.0) == Ballot(TermView(6, "three"), 15.0)
    assert proven.until_s == 11.0 + TERM_LEASE_S


@pytest.mark.parametrize(
    "wrong",
    [
        {"term": 0},
        {"term": TERM_MAX + 1},
        {"lease_s": -1.0},
        {"lease_s": 61.0},
        {"lease_s": float("nan")},
        {"router": ""},
        {"router": "r" * 129},
        {"url": "u" * 513},
    ],
)
def test_invalid_grants_are_rejected(wrong):
    with pytest.raises(RejectedError):
        GrantTerm(**{"term": 1, "router": "one", "lease_s": 3.0, **wrong})


@pytest.mark.parametrize(("text", "term"), [(None, None), ("7", 7), ("0", 0)])
def test_term_header_is_parsed(text, term):
    assert parse_term(text) == term


@pytest.mark.parametrize("text", ["", "-1", "x", "\u0663", "9" * 30])
def test_term_header_without_a_number_is_rejected(text):
    with pytest.raises(RejectedError):
        parse_term(text)


CALLS = st.tuples(
    st.integers(1, 6), st.sampled_from(["one", "two", "three"]), st.sampled_from([0.0, 1.0, 3.0])
)


@given(st.lists(st.tuples(st.floats(0.0, 2.0), CALLS), max_size=40))
def test_each_term_has_one_router_and_leases_never_overlap(requests):
    ballot, now_s = Ballot(), 0.0
    owners, leases = {}, []
    for step_s, (term, router, lease_s) in requests:
        now_s += step_s
        granted = ballot.after(GrantTerm(term, router, lease_s), now_s)
        if granted is None:
            continue
        assert granted.granted.term >= ballot.granted.term, "terms only grow"
        assert owners.setdefault(term, router) == router
        for other, until_s in leases:
            assert other == router or until_s <= now_s, "a lease was broken"
        leases = [(router, granted.until_s)]
        ballot = granted

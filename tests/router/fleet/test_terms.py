"""Votes under delays, losses, restarts and uneven clocks: one active router at most."""

import heapq
import random
from dataclasses import replace
from unittest import mock

import pytest

from fabric.control.term_calls import Ballot, GrantTerm, TermAnswer, TermView
from fabric.limits import TERM_LEASE_S
from router.fleet.terms import OWN_LEASE_S, RouterTerms, Vote

VOTERS = ("a", "b", "c")
LIFE_S, LIVES = 60.0, 50


class Router:
    """One router's vote by its own clock, over a network of delays."""

    def __init__(self, world, name, floor=0):
        self.world, self.name = world, name
        self.rate = world.random.uniform(0.93, 1.07)
        self.terms = RouterTerms(name, len(VOTERS), floor)
        self.round = None
        self.frozen_until_s = 0.0

    def now_s(self):
        return self.world.now_s * self.rate

    @property
    def held(self):
        return self.terms.held(self.now_s())

    def step(self):
        random = self.world.random
        if random.random() < 0.02:
            self.frozen_until_s = self.world.now_s + random.choice([1.0, 6.0])
        if self.world.now_s < self.frozen_until_s:
            self.world.at(self.frozen_until_s, self.step)
            return
        is_trial = self.held is None and random.random() < 0.5
        self.ask(self.terms.begin(self.now_s(), is_trial=is_trial))
        self.world.later(random.uniform(0.2, 0.8), self.step)

    def ask(self, vote):
        self.round = vote
        for voter in VOTERS:
            self.world.send(voter, vote.call, lambda answer, v=voter: self.receive(vote, v, answer))

    def receive(self, vote, voter, answer):
        if self.world.now_s < self.frozen_until_s:
            self.world.at(self.frozen_until_s, lambda: self.receive(vote, voter, answer))
            return
        vote.note(voter, answer)
        if vote.is_won and self.terms.end(vote):
            self.world.won.setdefault(vote.call.term, set()).add(self.name)


class World:
    """Voters with ballots on disks, and routers, on one real clock."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now_s, self.events, self.count = 0.0, [], 0
        self.ballots = dict.fromkeys(VOTERS, Ballot())
        self.rates = {voter: self.random.uniform(0.93, 1.07) for voter in VOTERS}
        self.loss = self.random.choice([0.0, 0.1, 0.3])
        self.late_s = self.random.choice([0.05, 1.0, 5.0])
        self.won, self.overlaps, self.active_s = {}, [], 0.0
        self.routers = [Router(self, name) for name in ("one", "two", "three")]

    def at(self, when_s, work):
        self.count += 1
        heapq.heappush(self.events, (when_s, self.count, work))

    def later(self, delay_s, work):
        self.at(self.now_s + delay_s, work)

    def send(self, voter, call, receive):
        def arrive():
            now_s = self.now_s * self.rates[voter]
            before = self.ballots[voter]
            after = before.after(call, now_s)
            if after is not None and not call.is_trial:
                self.ballots[voter] = after
            answer = self.ballots[voter].answer(now_s, granted=after is not None)
            if self.random.random() >= self.loss:
                self.later(self.random.random() * self.late_s, lambda: receive(answer))

        if self.random.random() >= self.loss:
            self.later(self.random.random() * self.late_s, arrive)

    def restart(self):
        voter = self.random.choice(VOTERS)
        until_s = self.now_s * self.rates[voter] + TERM_LEASE_S
        self.ballots[voter] = replace(self.ballots[voter], until_s=until_s)
        self.later(self.random.uniform(5.0, 20.0), self.restart)

    def live(self):
        for router in self.routers:
            self.later(self.random.random(), router.step)
        self.later(self.random.uniform(5.0, 20.0), self.restart)
        while self.events and self.now_s < LIFE_S:
            when_s, _, work = heapq.heappop(self.events)
            active = [router.name for router in self.routers if router.held is not None]
            self.active_s += (when_s - self.now_s) * bool(active)
            self.now_s = when_s
            work()
            active = [router.name for router in self.routers if router.held is not None]
            if len(active) > 1:
                self.overlaps.append((self.now_s, active))
        return self


def faults(seeds):
    lives = [World(seed).live() for seed in seeds]
    overlaps = [life.overlaps[0] for life in lives if life.overlaps]
    shared = [term for life in lives for term, names in life.won.items() if len(names) > 1]
    return overlaps, shared, lives


def test_one_router_is_active_at_a_time_and_no_term_has_two():
    overlaps, shared, lives = faults(range(LIVES))
    assert (overlaps, shared) == ([], [])
    assert sum(life.active_s for life in lives) > 0.3 * LIFE_S * LIVES, "a router is often active"
    assert sum(len(life.won) for life in lives) > 2 * LIVES, "terms change"


def voters_grant_during_a_lease():
    def after(self, call, _):
        if call.term < self.granted.term:
            return None
        return Ballot(TermView(call.term, call.router), self.until_s)

    return mock.patch.object(Ballot, "after", after)


def leases_start_at_the_answers():
    end = RouterTerms.end

    def end_late(self, vote):
        is_won = end(self, vote)
        self._until_s += 4.0 * is_won
        return is_won

    return mock.patch.object(RouterTerms, "end", end_late)


def one_vote_is_enough():
    return mock.patch.object(RouterTerms, "quorum", 1)


@pytest.mark.parametrize(
    "plant",
    [
        voters_grant_during_a_lease,
        leases_start_at_the_answers,
        one_vote_is_enough,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(plant):
    with plant():
        overlaps, shared, _ = faults(range(LIVES))
    assert overlaps or shared


def test_a_lease_ends_sooner_than_at_voters_with_faster_clocks():
    assert OWN_LEASE_S / 0.9 < TERM_LEASE_S / 1.1


def answered(vote, **grants):
    for voter, granted in grants.items():
        view = TermView(vote.call.term, "one") if granted else TermView(9, "two", "http://two")
        left_s = 0.0 if granted else 2.0
        vote.note(voter, TermAnswer(granted, view.term, view.router, view.url, left_s))
    return vote


def test_a_round_is_lost_as_soon_as_it_cannot_be_won():
    vote = RouterTerms("one", 3).begin(0.0, is_trial=True)
    vote.note("a", None)
    assert not vote.is_lost
    answered(vote, b=False)
    assert vote.is_lost
    assert answered(RouterTerms("one", 3).begin(0.0, is_trial=True), a=True, b=True).is_won


def test_a_trial_is_repeated_when_enough_leases_are_over():
    vote = answered(RouterTerms("one", 3).begin(0.0, is_trial=True), a=True, b=False)
    assert vote.wait_s == 2.0
    assert Vote(vote.call, 0.0, 2, 3).wait_s == 0.0


def test_a_term_of_another_router_is_exchanged_for_a_later_one():
    terms = RouterTerms("one", 3)
    assert terms.end(answered(terms.begin(0.0, is_trial=False), a=True, b=True, c=False))
    assert terms.held(1.0) == 1
    assert terms.highest == TermView(9, "two", "http://two")
    assert terms.begin(1.0, is_trial=False).call.term == 10


def test_a_term_that_a_voter_granted_to_another_router_is_exchanged():
    terms = RouterTerms("one", 3)
    vote = terms.begin(0.0, is_trial=False)
    answered(vote, a=True, b=True)
    vote.note("c", TermAnswer(False, 1, "two", "", 0.0))
    assert terms.end(vote)
    assert terms.begin(1.0, is_trial=False).call.term == 2
    assert terms.end(answered(terms.begin(1.0, is_trial=False), a=True, b=True, c=True))
    assert terms.begin(2.0, is_trial=False).call.term == 2


def test_a_promotion_by_hand_needs_one_vote_and_is_kept_by_it():
    terms = RouterTerms("one", 2)
    assert not terms.end(answered(terms.begin(0.0, is_trial=False), a=True))
    assert terms.end(answered(terms.begin(0.0, is_trial=False, is_forced=True), a=True))
    assert terms.is_forced
    assert terms.end(answered(terms.begin(1.0, is_trial=False), a=True))
    assert terms.end(answered(terms.begin(2.0, is_trial=False), a=True, b=True))
    assert not terms.is_forced
    assert terms.held(2.0 + OWN_LEASE_S) is None


def test_terms_begin_above_known_ones_and_are_released():
    terms = RouterTerms("one", 1, floor=20)
    assert terms.begin(0.0, is_trial=False).call == GrantTerm(21, "one", TERM_LEASE_S)
    assert terms.end(answered(terms.begin(0.0, is_trial=False), a=True))
    assert terms.release() == GrantTerm(21, "one", 0.0)
    assert terms.held(0.0) is None
    assert terms.release() is None

"""Planted faults in the votes for routers: found by lives with two of them."""

from unittest import mock

from fabric.control.term_calls import Ballot, TermView
from node.store.granted_terms import GrantedTerms
from router.fleet.terms import RouterTerms
from tests.sim.replaced import replaced


def nodes_grant_terms_during_a_lease():
    """Nodes grant every requested term, even during another router's lease."""

    def after(self, call, now_s):
        if call.term < self.granted.term:
            return None
        return Ballot(TermView(call.term, call.router, call.url), now_s + call.lease_s)

    return replaced(Ballot, "after", after)


def routers_stay_active_beyond_their_lease():
    """A router that was active once changes the fabric for as long as it lives."""

    def held(self, _):
        return self._term or None

    return replaced(RouterTerms, "held", held)


def restarted_nodes_forget_their_term():
    """A restarted node accepts the first router that calls it."""
    return mock.patch.object(GrantedTerms, "recall", return_value=None)


def terms_are_not_written():
    """A node answers a vote before it is on disk."""
    return mock.patch.object(GrantedTerms, "_write", return_value=None)


def nodes_obey_every_router():
    """No node checks the term of a call."""
    return mock.patch.object(Ballot, "check", return_value=None)


def one_vote_elects():
    """A router is active as soon as one node grants its term."""
    return replaced(RouterTerms, "quorum", 1)


TERM_PLANTS = (
    nodes_grant_terms_during_a_lease,
    routers_stay_active_beyond_their_lease,
    restarted_nodes_forget_their_term,
    terms_are_not_written,
    nodes_obey_every_router,
    one_vote_elects,
)

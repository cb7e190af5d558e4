"""Judge of terms: one router at a time changes the fabric, and each node obeys the latest it knows.

It checks the changes that nodes accept in each term, not whether a router may send them.
"""

import contextlib
from unittest import mock

from fabric.ids import SELF_TEST_TENANT
from node.store.granted_terms import GrantedTerms
from node.turn.claim import Claims
from router.fleet.terms import RouterTerms


class TermJudge:
    """The terms of one run: their routers, and the changes that nodes accepted in them."""

    def __init__(self, world):
        self._world = world
        self.winners = {}  # by term
        self.is_over = False
        self._known = {}  # by node: the highest term that it granted or accepted changes of,
        self._lasting = {}  # and the highest that it must have after a restart
        self._placed = {}  # by agent: the latest term in which a node served it, and the epoch
        self.placed_count = 0

    @contextlib.contextmanager
    def taps(self):
        """Record votes, and the changes that nodes accept."""
        end, grant, check = RouterTerms.end, GrantedTerms.grant, GrantedTerms.check
        write, own = GrantedTerms._write, Claims._check_ownership

        def ended(terms, vote):
            is_won = end(terms, vote)
            if is_won:
                self._on_won(terms, vote.call.term)
            return is_won

        async def granted(terms, call):
            answer = await grant(terms, call)
            if answer.granted and not call.is_trial and call.lease_s:
                self._on_accepted(terms, call.term, "grants")
                self._note_lasting(terms, call.term)
            return answer

        def written(terms, view):
            write(terms, view)  # raises on a full disk: an accepted term is in memory only then
            self._note_lasting(terms, view.term)

        def checked(terms, term):
            check(terms, term)
            self._on_accepted(terms, term or 0, "accepts a change of")

        async def owned(claims, agent, asked, erased_epoch):
            await own(claims, agent, asked, erased_epoch)
            self._on_placed(claims.terms, agent)

        with (
            mock.patch.object(RouterTerms, "end", ended),
            mock.patch.object(GrantedTerms, "grant", granted),
            mock.patch.object(GrantedTerms, "check", checked),
            mock.patch.object(GrantedTerms, "_write", written),
            mock.patch.object(Claims, "_check_ownership", owned),
        ):
            yield

    def _on_won(self, terms, term):
        winner = self.winners.setdefault(term, terms.router)
        if winner != terms.router:
            self._world.fail(f"term {term} has two routers: {winner} and {terms.router}")
        active = [host.process.name for host in self._world.router.hosts if _has_lease(host)]
        if len(active) > 1 and not self.is_over:
            self._world.fail(f"two routers are active: {active}")

    def _on_accepted(self, terms, term, what):
        name = terms._folder.name
        known, knower = self._known.get(name, (0, None))
        known = known if knower is terms else self._lasting.get(name, 0)  # it has restarted
        if term < known:
            self._world.fail(f"{name} {what} term {term}, after term {known}")
        self._known[name] = term, terms

    def _note_lasting(self, terms, term):
        name = terms._folder.name
        self._lasting[name] = max(term, self._lasting.get(name, 0))

    def _on_placed(self, terms, agent):
        if agent.key[0] == SELF_TEST_TENANT:
            return
        term, epoch = terms._ballot.granted.term, agent.manifest.epoch
        latest, at_epoch = self._placed.get(agent.key, (0, 0))
        self.placed_count += 1
        if term >= latest:
            self._placed[agent.key] = term, epoch
        elif epoch >= at_epoch:  # a lower epoch was sent in time, came late, and is fenced
            name = terms._folder.name
            self._world.fail(f"{name} serves {agent.key} in term {term}, placed in term {latest}")


def _has_lease(host):
    is_there = host.keeper is not None and not host.process.is_dead
    return is_there and host.keeper.held() is not None

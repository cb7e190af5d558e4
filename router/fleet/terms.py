"""A router's side of the vote for terms: its requests, and the end of its lease.

    following ── a trial that most voters would grant ──▶ asking ── most granted ──▶ active
        ▲                                                   │ refused                 │
        └──────────── gives up what was granted ◀───────────┘    its lease ends ◀─────┘

A lease counts from when the votes were asked for, and ends TERM_MARGIN sooner here than at the
voters, whose clocks may run faster. Pure: time and votes come from outside (`term_keeper.py`).
"""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from fabric.control.term_calls import NO_TERM, GrantTerm, TermAnswer, TermView
from fabric.limits import TERM_LEASE_S, TERM_MAX
from router.limits import TERM_MARGIN

OWN_LEASE_S: Final = TERM_LEASE_S * (1.0 - TERM_MARGIN)


@dataclass(slots=True)
class Vote:
    """Call to all voters, and their answers so far."""

    call: GrantTerm
    asked_s: float
    quorum: int
    voters_count: int
    answers: dict[str, TermAnswer | None] = field(default_factory=dict)  # None: no answer

    def note(self, voter: str, answer: TermAnswer | None) -> None:
        """Count a voter's answer; only its first counts."""
        self.answers.setdefault(voter, answer)

    @property
    def granted_count(self) -> int:
        return sum(answer is not None and answer.granted for answer in self.answers.values())

    @property
    def answered_count(self) -> int:
        return sum(answer is not None for answer in self.answers.values())

    @property
    def is_won(self) -> bool:
        return self.granted_count >= self.quorum

    @property
    def is_lost(self) -> bool:
        """Return whether the voters that have not answered cannot make it won."""
        return self.granted_count + self.voters_count - len(self.answers) < self.quorum

    @property
    def wait_s(self) -> float:
        """Return the seconds until enough leases are over for another trial; 0 if unknown."""
        waits = sorted(
            0.0 if answer.granted else answer.left_s
            for answer in self.answers.values()
            if answer is not None
        )
        return waits[self.quorum - 1] if len(waits) >= self.quorum else 0.0


class RouterTerms:
    """Terms known to one router, and its own."""

    def __init__(self, router: str, voters_count: int, floor: int = 0) -> None:
        """Vote as `router` among `voters_count`; its terms are above `floor`."""
        self.router = router
        self.voters_count = voters_count
        self.url = ""
        self.highest = replace(NO_TERM, term=floor)  # that any voter has granted
        self.last_vote: Vote | None = None
        self.is_forced = False  # its term was granted by fewer voters, as an operator wished
        self._term = 0  # that most voters granted to this router last
        self._until_s = -math.inf
        self._is_disputed = False  # a voter granted its term to another router, which lost it

    @property
    def quorum(self) -> int:
        """Number of voters that are most of them."""
        return self.voters_count // 2 + 1

    def held(self, now_s: float) -> int | None:
        """Return this router's term while its lease lasts."""
        return self._term if now_s < self._until_s else None

    def left_s(self, now_s: float) -> float:
        """Return the rest of this router's lease."""
        return max(0.0, self._until_s - now_s) if self.held(now_s) else 0.0

    def note_term(self, view: TermView) -> None:
        """Record a term that a voter granted."""
        is_named = view.term == self.highest.term and not self.highest.router
        if view.term > self.highest.term or is_named:
            self.highest = view

    def begin(self, now_s: float, *, is_trial: bool, is_forced: bool = False) -> Vote:
        """Begin a vote: for more time in this router's term, or for the next one.

        A forced vote is won by any voter's grant: an operator vouches for the absent ones. If a
        minority granted this term or a later one to another router, a higher one is requested,
        so that those voters obey this router again.
        """
        is_latest = self.highest.term <= self._term and not self._is_disputed
        is_current = self.held(now_s) is not None and is_latest
        term = self._term if is_current else min(self.highest.term + 1, TERM_MAX)
        call = GrantTerm(term, self.router, TERM_LEASE_S, self.url, is_trial=is_trial)
        is_forced |= self.is_forced and self.held(now_s) is not None
        return Vote(call, now_s, 1 if is_forced else self.quorum, self.voters_count)

    def release(self) -> GrantTerm | None:
        """Give up this router's term at once; return the call that notifies the voters."""
        term, self._term, self._until_s = self._term, 0, -math.inf
        return GrantTerm(term, self.router, 0.0, self.url) if term else None

    def end(self, vote: Vote) -> bool:
        """Evaluate a vote; return whether this router got the term that it requested."""
        self.last_vote = vote
        answers = [answer for answer in vote.answers.values() if answer is not None]
        views = Counter(TermView(each.term, each.router, each.url) for each in answers)
        if views:  # of two names for one term, the one that more voters gave is its router's
            latest = max(views, key=lambda view: (view.term, views[view]))
            self.highest = latest if latest.term >= self.highest.term else self.highest
        granted_routers = {each.router for each in answers if each.term == vote.call.term}
        self._is_disputed = bool(granted_routers - {"", self.router})
        if vote.call.is_trial or not vote.is_won:
            return False
        self._term = vote.call.term
        self._until_s = max(self._until_s, vote.asked_s + OWN_LEASE_S)
        self.is_forced = vote.granted_count < self.quorum
        return True


class TermAuthority(Protocol):
    """Source of the term with which this router may change the fabric."""

    @property
    def is_active(self) -> bool:
        """Return whether this router may change the fabric now."""
        ...

    def held(self) -> int | None:
        """Return the term of changing calls now; None without one."""
        ...

    def current(self) -> int | None:
        """Return the term of changing calls; raise RetryLaterError if it is another router's."""
        ...

    def note_term(self, view: TermView) -> None:
        """Record a term that a node granted."""
        ...

    def note_refusal(self) -> None:
        """Record that a node obeys another router."""
        ...


class SoleRouter:
    """Authority of the only router of a fabric, which needs no term."""

    is_active: Final = True

    def held(self) -> int | None:
        return None

    def current(self) -> int | None:
        return None

    def note_term(self, view: TermView) -> None:
        """Ignore terms: they were granted when the fabric had several routers."""

    def note_refusal(self) -> None:
        """Leave the error of the node to the caller."""


SOLE_ROUTER: Final = SoleRouter()

"""Terms of routers: nodes grant one of several routers the right to change the fabric.

    GrantTerm(term) ──▶ every voter      granted: no other router gets one for `lease_s`
    any changing call carries its term   lower than the granted one: 409 old_router

A router that most voters granted a term is the active one until its lease ends. A voter writes a
new term to disk before it answers. Fabrics with one router grant no term, and calls carry none.
"""

from dataclasses import dataclass
from typing import Final

from fabric.errors import OldRouterError, RejectedError
from fabric.limits import (
    ROUTER_NAME_CHARS_MAX,
    TERM_LEASE_S,
    TERM_LEASE_S_MAX,
    TERM_MAX,
    URL_CHARS_MAX,
)

TERM_HEADER: Final = "x-macfabric-term"  # of requests that are no control calls


@dataclass(frozen=True, slots=True)
class GrantTerm:
    """Request for a term, or for more time in it; a trial changes nothing."""

    term: int
    router: str  # one run of a router's process, which shares its terms with no other
    lease_s: float  # 0 gives the term up
    url: str = ""  # at which the router serves clients
    is_trial: bool = False

    def __post_init__(self) -> None:
        """Raise RejectedError for values out of range."""
        if not 0 < self.term <= TERM_MAX:
            message = f"a term must be a number from 1 to {TERM_MAX}"
            raise RejectedError(message, code="invalid_term")
        if not 0 <= self.lease_s <= TERM_LEASE_S_MAX:
            message = f"a lease must be from 0 to {TERM_LEASE_S_MAX:g} seconds"
            raise RejectedError(message, code="invalid_term")
        if not 0 < len(self.router) <= ROUTER_NAME_CHARS_MAX or len(self.url) > URL_CHARS_MAX:
            message = (
                f"a router's name must have 1 to {ROUTER_NAME_CHARS_MAX} characters, and its URL "
                f"at most {URL_CHARS_MAX}"
            )
            raise RejectedError(message, code="invalid_term")


@dataclass(frozen=True, slots=True)
class TermAnswer:
    """Answer of a voter: whether it grants the term, and the last term that it granted."""

    granted: bool
    term: int
    router: str
    url: str
    left_s: float  # until it may grant another router a higher term


@dataclass(frozen=True, slots=True)
class TermView:
    """Highest term that a node granted, and its router, as heartbeats carry them."""

    term: int
    router: str
    url: str = ""


NO_TERM: Final = TermView(0, "")


@dataclass(frozen=True, slots=True)
class Ballot:
    """Promise of a voter: no other router gets a term before `until_s`, by the voter's clock."""

    granted: TermView = NO_TERM
    until_s: float = 0.0

    def is_for(self, call: GrantTerm) -> bool:
        """Return whether this ballot grants the call's term to its router.

        A term that a changing call proved has no router's name yet; only that router uses it.
        """
        return self.granted.term == call.term and self.granted.router in {"", call.router}

    def after(self, call: GrantTerm, now_s: float) -> "Ballot | None":
        """Return the ballot after granting `call`; None if it must be refused.

        A router may exchange its own term for a later one.
        """
        if self.is_for(call):
            granted = TermView(call.term, call.router, call.url)
            return Ballot(granted, now_s + call.lease_s)
        is_held = now_s < self.until_s and call.router != self.granted.router
        if call.term <= self.granted.term or is_held or call.lease_s <= 0:
            return None
        return Ballot(TermView(call.term, call.router, call.url), now_s + call.lease_s)

    def with_proven_term(self, term: int, now_s: float) -> "Ballot":
        """Return the ballot after a changing call of a later term, which most voters granted."""
        return Ballot(TermView(term, ""), now_s + TERM_LEASE_S)

    def answer(self, now_s: float, *, granted: bool) -> TermAnswer:
        """Return the answer to a call after which this is the ballot."""
        view = self.granted
        left_s = max(0.0, self.until_s - now_s)
        return TermAnswer(granted, view.term, view.router, view.url, left_s)

    def is_later(self, term: int | None) -> bool:
        """Return whether a changing call proves a term that this voter has not granted."""
        return term is not None and term > self.granted.term

    def check(self, term: int | None, now_s: float) -> None:
        """Raise OldRouterError for a changing call of a router whose term has ended here."""
        granted = self.granted.term
        if granted and (term or 0) < granted:
            sent = f"term {term} is over" if term else "the call has no term"
            message = (
                f"{sent}: term {granted} was granted to another router; "
                "a fabric with a standby takes changes from its active router only"
            )
            raise OldRouterError(message)
        is_named = bool(self.granted.router)  # else its router requests no lease here, or cannot
        if granted and term == granted and is_named and now_s >= self.until_s:
            message = f"the lease of term {granted} has ended here; its router must renew it"
            raise OldRouterError(message)


def parse_term(text: str | None) -> int | None:
    """Return the term in a request's header; raise RejectedError for anything but a number."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) <= len(str(TERM_MAX)):
        return int(text)
    message = f"{TERM_HEADER} must be a whole number of at most {len(str(TERM_MAX))} digits"
    raise RejectedError(message, code="invalid_term")

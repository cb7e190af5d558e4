"""Keeper of a router's term: requests it from the voters periodically, and reports changes.

Voters are the fabric's nodes, and processes of `macfabric voter` for fabrics of two Macs. Their
number is configured: a majority of those that happen to answer could exist twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from fabric.control.term_calls import GrantTerm, TermAnswer, TermView
from fabric.errors import FabricError, RetryLaterError
from fabric.limits import TERM_LEASE_S
from router.fleet.terms import RouterTerms, Vote
from router.limits import TERM_RENEW_S, TERM_RETRY_S, TERM_TRIAL_S

_LOG = logging.getLogger("macfabric.router.terms")

VOTE_S = 1.0  # after which a voter's answer counts as refused
REST_S_MIN = 0.02
TWO_VOTERS = (
    "two voters cannot elect a router without each other: add a third one with `macfabric voter`, "
    "or choose by hand with `macfabric promote`"
)


# Sends one voter a call; raises FabricError without an answer.
VoterCall = Callable[[GrantTerm], Awaitable[TermAnswer]]


class TermKeeper:
    """Authority of a router that may have a standby, or is one."""

    def __init__(
        self,
        terms: RouterTerms,
        now_s: Callable[[], float],
        random: Callable[[], float],
        *,
        patience_s: float = 0.0,
    ) -> None:
        """Keep `terms`; request none during the first `patience_s`. `random` is in [0, 1)."""
        self.terms = terms
        self._voters: Callable[[], Mapping[str, VoterCall]] = dict
        self._on_active: Callable[[int], None] = lambda _: None
        self._is_retired = False
        self._now_s = now_s
        self._random = random
        self._patience_s = patience_s
        self._term: int | None = None  # as of the last look
        self._is_forced = False  # the next vote is
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._late: set[asyncio.Task[TermAnswer | None]] = set()

    def bind(
        self,
        floor: int,
        voters: Callable[[], Mapping[str, VoterCall]],
        on_active: Callable[[int], None],
    ) -> None:
        """Ask `voters` for terms above `floor`; call `on_active` with each that is granted."""
        self._voters = voters
        self._on_active = on_active
        self.terms.note_term(TermView(floor, ""))

    # --- authority -----------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        return self._term is not None and self.held() is not None

    @property
    def active_url(self) -> str:
        """URL of the router that got the highest term; empty if unknown, or if it is this one."""
        highest = self.terms.highest
        return "" if highest.router == self.terms.router else highest.url

    def held(self) -> int | None:
        return self.terms.held(self._now_s())

    def current(self) -> int | None:
        term = self.held()
        if term is None:
            message = "this router is not the active one: send the request again"
            raise RetryLaterError(message, retry_after_s=1.0, code="no_active_router")
        return term

    def note_term(self, view: TermView) -> None:
        self.terms.note_term(view)

    def note_refusal(self) -> None:
        self._wake.set()

    @property
    def problem(self) -> str | None:
        """Return why no router may be elected, in words; None if one can be."""
        present_count, count = len(self._voters()), self.terms.voters_count
        if present_count > count:
            return (
                f"{present_count} voters are present, but {count} are expected: correct "
                "router.nodes_expected and router.voters, which all routers must agree on"
            )
        last_vote = self.terms.last_vote
        if last_vote is not None and last_vote.answered_count < self.terms.quorum:
            reached = (
                f"{last_vote.answered_count} of {count} voters answer, {self.terms.quorum} needed"
            )
            return f"{reached}; {TWO_VOTERS}" if count == 2 else reached
        return TWO_VOTERS if count == 2 else None

    # --- work ----------------------------------------------------------------------------------

    async def wait_for(self, *, active: bool) -> None:
        """Wait until this router is active, or until it is not."""
        while self.is_active is not active:
            self._changed.clear()
            with suppress(TimeoutError):  # a lease also ends by the clock alone
                async with asyncio.timeout(TERM_RENEW_S):
                    await self._changed.wait()

    async def run(self) -> None:
        """Request the term, or more time in it, until cancelled; then give it up."""
        try:
            await asyncio.sleep(self._patience_s)
            while True:
                rest_s = await self._step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(REST_S_MIN, rest_s)):
                        await self._wake.wait()
                self._wake.clear()
        finally:
            for task in self._late:
                task.cancel()

    async def give_up(self) -> None:
        """Give the term up and request no other: no router need wait for its end."""
        self._is_retired = True
        call = self.terms.release()
        self._report_change()
        if call is not None:
            await self._ask(Vote(call, self._now_s(), self.terms.voters_count, 0))

    async def promote(self) -> None:
        """Become active with the votes of those that answer; raise RetryLaterError if none does.

        The caller vouches that no other router is active.
        """
        self._is_forced = True
        self._patience_s = 0.0
        deadline_s = self._now_s() + 2 * TERM_LEASE_S  # the lease of the lost router must end
        while not self.is_active and self._now_s() < deadline_s:
            self._wake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(TERM_RETRY_S):
                    await self.wait_for(active=True)
        self._is_forced = False
        if not self.is_active:
            message = self.problem or "no voter grants a term: another router is active"
            raise RetryLaterError(message, code="not_promoted")

    async def _step(self) -> float:
        """Ask once; return for how long to rest."""
        terms = self.terms
        self._report_change()
        if self._is_retired:
            return TERM_RENEW_S
        if self.held() is None:
            trial = await self._ask(self._begin(is_trial=True))
            if not trial.is_won:
                return min(TERM_TRIAL_S, trial.wait_s or TERM_TRIAL_S)
        vote = await self._ask(self._begin(is_trial=False))
        if self.held() is not None:
            return TERM_RENEW_S
        if vote.granted_count:  # too few: other routers need not wait for the end of these
            call = GrantTerm(vote.call.term, terms.router, 0.0)
            await self._ask(Vote(call, self._now_s(), terms.voters_count, 0))
        return TERM_RETRY_S * self._random()

    def _begin(self, *, is_trial: bool) -> Vote:
        return self.terms.begin(self._now_s(), is_trial=is_trial, is_forced=self._is_forced)

    async def _ask(self, vote: Vote) -> Vote:
        """Ask all voters; return once enough have answered."""
        voters = self._voters()
        if len(voters) <= self.terms.voters_count:
            tasks = {
                asyncio.create_task(_answer(voter, vote.call)): name
                for name, voter in voters.items()
            }
            for number in range(self.terms.voters_count - len(voters)):
                vote.note(f"absent {number}", None)
            await self._collect(vote, tasks)
        if vote.call.lease_s:
            self.terms.end(vote)
        self._report_change()
        return vote

    async def _collect(
        self, vote: Vote, tasks: dict["asyncio.Task[TermAnswer | None]", str]
    ) -> None:
        pending = dict(tasks)
        try:
            while pending and not vote.is_won and not vote.is_lost:
                await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in pending if task.done()]:
                    vote.note(pending.pop(task), task.result())
        finally:
            self._late.update(pending)  # their votes still fence other routers
            for task in pending:
                task.add_done_callback(self._late.discard)

    def _report_change(self) -> None:
        """Report a change of the held term."""
        term = self.held()
        if term == self._term:
            return
        before, self._term = self._term, term
        if term is None:
            _LOG.warning("the lease of term %s is over: another router may become active", before)
        else:
            _LOG.info("this router is the active one, in term %d", term)
            self._on_active(term)
        self._changed.set()


async def _answer(voter: VoterCall, call: GrantTerm) -> TermAnswer | None:
    try:
        async with asyncio.timeout(VOTE_S):
            return await voter(call)
    except (FabricError, TimeoutError):
        return None

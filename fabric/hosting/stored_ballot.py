"""The ballot of a process that votes for routers: each promise is stored before the reply."""

import asyncio
from collections.abc import Awaitable, Callable

from fabric.control.term_calls import Ballot, GrantTerm, TermAnswer, TermView
from fabric.errors import FabricError
from fabric.limits import TERM_LEASE_S


class StoredBallot:
    """Ballot that handles one call at a time, and changes only after its term is stored."""

    def __init__(
        self, write: Callable[[TermView], Awaitable[None]], now_s: Callable[[], float]
    ) -> None:
        """Start without a term; `write` stores one, and raises FabricError if it cannot."""
        self._ballot = Ballot()
        self._write = write
        self._now_s = now_s
        self._changing = asyncio.Lock()

    @property
    def granted(self) -> TermView:
        """Highest term that was granted; `NO_TERM` before the first."""
        return self._ballot.granted

    def recall(self, granted: TermView) -> None:
        """Restore the term that the previous process stored.

        What is left of its lease is unknown, so the lease starts again.
        """
        self._ballot = Ballot(granted, self._now_s() + TERM_LEASE_S)

    async def grant(self, call: GrantTerm) -> TermAnswer:
        """Grant a term, extend its lease, or refuse; raise FabricError if it cannot be stored."""
        async with self._changing:
            now_s = self._now_s()
            after = self._ballot.after(call, now_s)
            if after is not None and not call.is_trial:
                await self._adopt(after)
            return self._ballot.answer(now_s, granted=after is not None)

    async def follow(self, term: int | None) -> FabricError | None:
        """Adopt a later term that a changing call proves; return why it could not be stored.

        That is no vote: earlier routers are refused for as long as this process lives.
        """
        if not self._ballot.is_later(term):
            return None
        async with self._changing:
            if term is None or not self._ballot.is_later(term):
                return None
            proven = self._ballot.with_proven_term(term, self._now_s())
            try:
                await self._adopt(proven)
            except FabricError as error:
                self._ballot = proven
                return error
        return None

    def check(self, term: int | None) -> None:
        """Raise OldRouterError for a changing call of a router whose term has ended."""
        self._ballot.check(term, self._now_s())

    async def _adopt(self, ballot: Ballot) -> None:
        if ballot.granted != self._ballot.granted:
            await self._write(ballot.granted)
        self._ballot = ballot

"""The highest router's term that this node granted, in a file beside the incarnation.

A term is written before it is answered, so that a restarted node obeys no earlier router and does
not grant the same term twice. The time of its lease is not written: after a restart the lease
starts again, as the node cannot know how much of it is left.

    DIR/<node>/term    the term, its router, and that router's URL
"""

import asyncio
import logging
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from fabric.codec import pack, unpack
from fabric.control.term_calls import Ballot, GrantTerm, TermAnswer, TermView
from fabric.errors import CorruptDataError, FabricError, FatalError, RejectedError
from fabric.limits import TERM_LEASE_S
from fabric.ports import Clock
from node.limits import TERM_FILE_BYTES_MAX
from node.runtime.workers import Workers
from node.store.posix_disk import PosixDisk

FILE: Final = "term"

_log = logging.getLogger(__name__)


class GrantedTerms:
    """A node's vote for routers, and its fence against those whose term is over."""

    def __init__(self, folder: Path, workers: Workers, clock: Clock) -> None:
        self._folder = folder
        self._workers = workers
        self._clock = clock
        self._ballot = Ballot()
        self._changing = asyncio.Lock()

    @property
    def view(self) -> TermView | None:
        """Highest term that was granted; None in a fabric whose routers take no terms."""
        return self._ballot.granted if self._ballot.granted.term else None

    def recall(self) -> None:
        """Read the term that the previous process granted; raise FatalError if it is damaged."""
        with closing(PosixDisk(self._folder)) as disk:
            try:
                granted = unpack(TermView, disk.read(FILE, TERM_FILE_BYTES_MAX))
            except FileNotFoundError:
                return
            except (CorruptDataError, RejectedError) as error:
                message = (
                    f"{self._folder / FILE} is damaged ({error.message}): which router this node "
                    "obeys is unknown; stop all routers but one and remove the file"
                )
                raise FatalError(message) from None
        self._ballot = Ballot(granted, self._clock.monotonic_s() + TERM_LEASE_S)

    async def grant(self, call: GrantTerm) -> TermAnswer:
        """Grant a term, extend its lease, or refuse; raise DiskError if it cannot be written."""
        async with self._changing:
            before, now_s = self._ballot, self._clock.monotonic_s()
            after = before.after(call, now_s)
            if after is None or call.is_trial:
                return before.answer(now_s, granted=after is not None)
            await self._adopt(after)
            if after.granted.term != before.granted.term:
                _log.info("term %d is granted to router %s", call.term, call.router)
            return after.answer(now_s, granted=True)

    async def admit(self, term: int | None) -> None:
        """Take note of a later term; raise OldRouterError for a router whose term is over."""
        if self._ballot.is_later(term):
            async with self._changing:
                if self._ballot.is_later(term) and term is not None:
                    proven = self._ballot.proven(term, self._clock.monotonic_s())
                    try:
                        await self._adopt(proven)
                    except FabricError as error:
                        # No vote: routers before it are refused, as long as this process lives.
                        _log.warning("term %d is in memory only: %s", term, error.message)
                        self._ballot = proven
        self.check(term)

    def check(self, term: int | None) -> None:
        """Raise OldRouterError for a changing call of a router whose term is over."""
        self._ballot.check(term, self._clock.monotonic_s())

    async def _adopt(self, ballot: Ballot) -> None:
        """Make a ballot this node's, once its term is on disk; raise DiskError otherwise."""
        if ballot.granted != self._ballot.granted:
            await self._workers.run(partial(self._write, ballot.granted))
        self._ballot = ballot

    def _write(self, granted: TermView) -> None:
        with closing(PosixDisk(self._folder, must_exist=True)) as disk:
            disk.publish(FILE, [pack(granted)])

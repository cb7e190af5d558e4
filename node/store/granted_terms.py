"""The highest router's term that this node granted, in a file beside the incarnation.

A term is written before it is answered, so that a restarted node obeys no earlier router and does
not grant the same term twice. The time of its lease is not written: after a restart the lease
starts again, as the node cannot know how much of it is left.

    DIR/<node>/term    the term, its router, and that router's URL
"""

import logging
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from fabric.codec import pack, unpack
from fabric.control.term_calls import GrantTerm, TermAnswer, TermView
from fabric.errors import CorruptDataError, FatalError, RejectedError
from fabric.hosting.stored_ballot import StoredBallot
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
        self._ballot = StoredBallot(self._store, clock.monotonic_s)

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
        self._ballot.recall(granted)

    async def grant(self, call: GrantTerm) -> TermAnswer:
        """Grant a term, extend its lease, or refuse; raise DiskError if it cannot be written."""
        before = self._ballot.granted.term
        answer = await self._ballot.grant(call)
        if self._ballot.granted.term != before:
            _log.info("term %d is granted to router %s", answer.term, answer.router)
        return answer

    async def admit(self, term: int | None) -> None:
        """Record a later term; raise OldRouterError for a router whose term is over."""
        error = await self._ballot.follow(term)
        if error is not None:
            _log.warning("term %d is in memory only: %s", term, error.message)
        self.check(term)

    def check(self, term: int | None) -> None:
        """Raise OldRouterError for a changing call of a router whose term is over."""
        self._ballot.check(term)

    async def _store(self, granted: TermView) -> None:
        await self._workers.run(partial(self._write, granted))

    def _write(self, granted: TermView) -> None:
        with closing(PosixDisk(self._folder, must_exist=True)) as disk:
            disk.publish(FILE, [pack(granted)])

"""Pace of accepting requests: a few in each round of the event loop.

Hundreds that arrive at once would be parsed, placed and sent in the same rounds. Each of those
takes a second or more; heartbeats wait as long, and live nodes count as silent.
"""

import asyncio

from router.fair_queue import FairQueue


class RoundPacer:
    """Turnstile that lets a few requests pass in each round, taking turns between owners."""

    def __init__(self, per_round_max: int) -> None:
        self._per_round_max = per_round_max
        self._passed_count = 0  # in this round
        self._waiting = FairQueue[asyncio.Future[None]]()
        self._is_scheduled = False

    async def wait(self, owner: str) -> None:
        """Return once it is the turn of a request of `owner`."""
        if not self._waiting and self._passed_count < self._per_round_max:
            self._passed_count += 1
            self._schedule()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(owner, turn, 1.0)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove(owner, turn)
            raise

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_round)

    def _begin_round(self) -> None:
        self._is_scheduled = False
        self._passed_count = 0
        while self._passed_count < self._per_round_max:
            turn = self._waiting.next()
            if turn is None:
                break
            if not turn.done():
                turn.set_result(None)
                self._passed_count += 1
        if self._passed_count:
            self._schedule()

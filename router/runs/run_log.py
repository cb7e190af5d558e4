"""Log of a run's events and its followers: stored events first, then live ones.

    append ──▶ the last SCENARIO_EVENTS_MAX events, as SSE frames
                  ├─▶ follower: a position in the log, advanced as it reads
                  └─▶ slow follower: `cut`, then its end; it reconnects with its last event's id

Followers buffer no events, so a slow one costs no memory and delays no other.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from itertools import islice
from typing import Any

from fabric.errors import OverloadedError
from router.fresh_ids import fresh_name
from router.http.sse import COMMENT, frame
from router.limits import (
    SCENARIO_EVENTS_BYTES_MAX,
    SCENARIO_EVENTS_MAX,
    SCENARIO_FOLLOWERS_MAX,
    SCENARIO_FRAMES_MAX,
    SCENARIO_LAG_EVENTS_MAX,
)

CUT = "cut"
MISSED = "missed"


class RunLog:
    """Events of one run in this process; another process replays durable ones under new ids."""

    def __init__(self) -> None:
        self._prefix = fresh_name("")
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._count = 0  # of all events: the number of the last one
        self._news = asyncio.Event()
        self._is_closed = False
        self.followers_count = 0

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add an event; the oldest are dropped to stay within the limits."""
        self._count += 1
        event = frame(row, name, f"{self._prefix}-{self._count}")
        self._kept.append(event)
        self._kept_bytes += len(event)
        while self._kept_bytes > SCENARIO_EVENTS_BYTES_MAX or len(self._kept) > SCENARIO_EVENTS_MAX:
            self._kept_bytes -= len(self._kept.popleft())
        self._wake()

    def close(self) -> None:
        """End the log: followers read the rest and leave."""
        self._is_closed = True
        self._wake()

    def join(self) -> None:
        """Add a follower; raise OverloadedError where there are too many."""
        if self.followers_count >= SCENARIO_FOLLOWERS_MAX:
            message = f"at most {SCENARIO_FOLLOWERS_MAX} clients may follow a run"
            raise OverloadedError(message)
        self.followers_count += 1

    def leave(self) -> None:
        self.followers_count -= 1

    async def frames(self, after: str | None) -> AsyncGenerator[bytes, None]:
        """Yield events after the one with the id `after`; all of them for an unknown id."""
        seen = self._number_of(after)
        yield COMMENT  # sends the headers before the first event
        while True:
            first = self._count - len(self._kept)
            if seen < first:
                yield frame({"count": first - seen}, MISSED)
                seen = first
            count = self._count
            if seen < count:
                at = seen - first
                batch = list(islice(self._kept, at, at + SCENARIO_FRAMES_MAX))
                seen += len(batch)
                yield b"".join(batch)
                if self._count - count > SCENARIO_LAG_EVENTS_MAX:
                    yield frame({"last": self._id_of(seen)}, CUT)
                    return
            elif self._is_closed:
                return
            else:
                await self._news.wait()

    def _id_of(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _number_of(self, name: str | None) -> int:
        prefix, _, number = (name or "").rpartition("-")
        known = prefix == self._prefix and number.isascii() and number.isdecimal()
        return min(int(number[:20]), self._count) if known else 0

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

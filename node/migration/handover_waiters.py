"""Turns that come ahead of their agent: they wait here until its move is decided.

Whoever continues a stream on the target is on the way while the target still commits: by the
time that the agent has landed, its turn has been received, parsed and rendered.
"""

import asyncio
from collections import Counter
from typing import Final

from fabric.errors import RetryElsewhereError
from fabric.ids import MigrationId

LANDING_WAIT_S: Final = 30.0


class Landings:
    """Events of moves that somebody waits for, on the node's event loop."""

    def __init__(self) -> None:
        self._decided: dict[MigrationId, asyncio.Event] = {}
        self._waiting: Counter[MigrationId] = Counter()

    @property
    def waiting_count(self) -> int:
        """Turns that wait."""
        return self._waiting.total()

    def note(self, migration: MigrationId) -> None:
        """Wake who waits for this move: it was committed, refused or forgotten."""
        event = self._decided.get(migration)
        if event is not None:
            event.set()

    async def wait(self, migration: MigrationId) -> None:
        """Wait until a move is decided; raise RetryElsewhereError if that lasts too long."""
        event = self._decided.setdefault(migration, asyncio.Event())
        self._waiting[migration] += 1
        try:
            await asyncio.wait_for(event.wait(), LANDING_WAIT_S)
        except TimeoutError:
            message = f"the agent has not arrived within {LANDING_WAIT_S:g} s"
            raise RetryElsewhereError(message) from None
        finally:
            self._waiting[migration] -= 1
            if not self._waiting[migration]:
                del self._waiting[migration], self._decided[migration]

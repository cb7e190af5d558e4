"""Streams that pause while their agent moves, and prompts that are held for them.

    source   handed over ──▶ saved and sealed          target   commit ──▶ first step here

Each of these steps waits for the engine, so another prompt's chunk would lengthen the pause several
times over. Prompts are held meanwhile, but never longer than PREFILL_HOLD_S at a stretch, however
many agents move and whatever the outcome.
"""

from threading import Lock

from fabric.ids import MigrationId
from fabric.ports import Clock
from node.limits import PREFILL_HOLD_S


class MovingStreams:
    """Pauses of moving streams: written by the event loop, read by the engine thread."""

    def __init__(self, clock: Clock) -> None:
        self.are_coming = False  # blocks of a stream that still runs elsewhere arrive here
        self._clock = clock
        self._lock = Lock()
        self._silent_until_s: dict[MigrationId, float] = {}

    def begin_pause(self, move: MigrationId) -> None:
        """Note that a stream waits for this move; it counts for PREFILL_HOLD_S at most."""
        with self._lock:
            self._silent_until_s.setdefault(move, self._clock.monotonic_s() + PREFILL_HOLD_S)

    def end_pause(self, move: MigrationId | None) -> None:
        """Note that the stream no longer waits for this node; idempotent."""
        if move is not None:
            with self._lock:
                self._silent_until_s.pop(move, None)

    @property
    def are_silent(self) -> bool:
        if not self._silent_until_s:  # most often
            return False
        with self._lock:
            now_s = self._clock.monotonic_s()
            for move in [m for m, until_s in self._silent_until_s.items() if until_s <= now_s]:
                del self._silent_until_s[move]
            return bool(self._silent_until_s)


class PrefillHold:
    """Time that prompts have been held without a chunk; used on the engine thread."""

    def __init__(self, clock: Clock, streams: MovingStreams) -> None:
        self._clock = clock
        self._streams = streams
        self._since_s: float | None = None

    def holds(self) -> bool:
        """Return whether ready prompts wait; after PREFILL_HOLD_S one chunk is computed."""
        if not self._streams.are_silent:
            self._since_s = None
            return False
        now_s = self._clock.monotonic_s()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s < PREFILL_HOLD_S:
            return True
        self._since_s = None
        return False

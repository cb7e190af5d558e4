"""Streams that are silent because their agent moves, and what others wait for meanwhile.

    source   handed over ──▶ saved and sealed          target   commit ──▶ first step here

Each of these steps waits for the engine, so another prompt's chunk would lengthen the silence
several times over. Prompts are held for it, but none longer than PREFILL_HOLD_S at a stretch,
however many agents move and whatever becomes of them.
"""

from threading import Lock

from fabric.ids import MigrationId
from fabric.ports import Clock
from node.limits import PREFILL_HOLD_S


class MovingStreams:
    """Told by the event loop, asked by the engine thread."""

    def __init__(self, clock: Clock) -> None:
        self.are_coming = False  # memory of some arrives here, while they still run elsewhere
        self._clock = clock
        self._lock = Lock()
        self._silent_until_s: dict[MigrationId, float] = {}

    def fall_silent(self, move: MigrationId) -> None:
        """Note that a stream waits for this move; it counts for PREFILL_HOLD_S at most."""
        with self._lock:
            self._silent_until_s.setdefault(move, self._clock.monotonic_s() + PREFILL_HOLD_S)

    def go_on(self, move: MigrationId | None) -> None:
        """Note that it waits for nothing here any more; more than once does no harm."""
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
    """How long prompts have been held without a chunk; for the engine thread."""

    def __init__(self, clock: Clock, streams: MovingStreams) -> None:
        self._clock = clock
        self._streams = streams
        self._since_s: float | None = None

    def holds(self) -> bool:
        """Say whether prompts that are ready wait; after PREFILL_HOLD_S a chunk is computed."""
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

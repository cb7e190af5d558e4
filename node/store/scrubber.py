"""Scrubber: reads stored blocks again in idle moments, to find damage before they are needed.

A round reads every block once, at a budget of bytes per second and only in idle moments; the
next round starts a day after this one did. The store quarantines damaged blocks.
"""

import logging

from fabric.ports import Clock
from fabric.settings import NodeSettings
from node.background_loop import BackgroundLoop
from node.limits import SCRUB_IDLE_S, SCRUB_STEP_S
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.store.block_store import BlockStore

_log = logging.getLogger(__name__)


class Scrubber:
    """Scrubs a node's blocks in rounds; used on its event loop."""

    def __init__(
        self,
        settings: NodeSettings,
        clock: Clock,
        workers: Workers,
        blocks: BlockStore,
        turns: LiveTurns,
        health: Health,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._workers = workers
        self._blocks = blocks
        self._turns = turns
        self._health = health
        self.scrubbed_bytes = 0
        self._loop = BackgroundLoop(
            "checking stored blocks",
            self.step,
            health.note_failed_round,
            first_wait_s=SCRUB_STEP_S,
        )
        self._idle_since_s: float | None = None
        self._round_began_s: float | None = None
        self._is_round_over = True

    def start(self) -> None:
        """Start unless the settings disable scrubbing."""
        if self._settings.scrub_bytes_per_s and self._health.reuses:
            self._loop.start()

    async def stop(self) -> None:
        """Stop after the block that is being read."""
        await self._loop.stop()

    async def step(self) -> float:
        """Check a step's worth of blocks if now is a good time; return the seconds to wait."""
        if not self._is_idle():
            return SCRUB_STEP_S
        now_s, per_s = self._clock.monotonic_s(), self._settings.scrub_bytes_per_s
        if self._is_round_over:
            began_s, every_s = self._round_began_s, self._settings.scrub_every_s
            if began_s is not None and now_s < began_s + every_s:
                return min(SCRUB_IDLE_S, began_s + every_s - now_s)
            self._round_began_s = now_s
        budget_bytes = max(1, int(per_s * SCRUB_STEP_S))
        done = await self._workers.run(lambda: self._blocks.scrub(budget_bytes))
        self._is_round_over = done.is_round_over
        if not done.blocks_count:
            self._round_began_s = None  # nothing is stored yet, so no round has run
            return SCRUB_IDLE_S
        self.scrubbed_bytes += done.file_bytes
        if done.damaged:
            _log.error("%d stored blocks are damaged and quarantined", len(done.damaged))
        # One block may be over the budget: it is paid back before the next.
        return max(SCRUB_STEP_S, done.file_bytes / per_s)

    def _is_idle(self) -> bool:
        now_s = self._clock.monotonic_s()
        if self._turns or self._health.is_draining:
            self._idle_since_s = None
            return False
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return now_s - self._idle_since_s >= SCRUB_IDLE_S

"""Warm start: read shared blocks into the page cache once after a start.

No list is stored for it. The records, which each start reads, show which blocks are popular: those
with the most references are read first. So no list can be lost, go stale, or reveal erased texts.
"""

import logging
from collections import deque

from fabric.kvcache.block_chain import BlockRef
from node.background_loop import BackgroundLoop
from node.limits import WARM_START_BYTES_MAX, WARM_START_BYTES_PER_S, WARM_START_STEP_S
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.store.block_store import BlockStore

_DONE_WAIT_S = 24 * 3600.0
_log = logging.getLogger(__name__)


class WarmStart:
    """Warms a node's caches after its start; used on its event loop."""

    def __init__(
        self, workers: Workers, blocks: BlockStore, turns: LiveTurns, health: Health
    ) -> None:
        self._workers = workers
        self._blocks = blocks
        self._turns = turns
        self._health = health
        self._due: deque[tuple[BlockRef, int]] | None = None
        self._loop = BackgroundLoop("reading shared blocks", self.step, health.note_failed_round)
        self.read_bytes = 0

    def start(self) -> None:
        """Start unless the node reuses nothing."""
        if self._health.reuses:
            self._loop.start()

    async def stop(self) -> None:
        """Stop after the blocks that are being read."""
        await self._loop.stop()

    async def step(self) -> float:
        """Read a step's worth of blocks unless a turn runs; return the seconds to wait."""
        if self._due is None:
            shared = self._blocks.shared
            self._due = deque(await self._workers.run(lambda: shared(WARM_START_BYTES_MAX)))
        if not self._due:
            return _DONE_WAIT_S
        if self._turns or self._health.is_draining:
            return WARM_START_STEP_S
        refs, step_bytes = [], 0
        while self._due and step_bytes < WARM_START_BYTES_PER_S * WARM_START_STEP_S:
            ref, size_bytes = self._due.popleft()
            refs.append(ref)
            step_bytes += size_bytes
        damaged = await self._workers.run(lambda: self._blocks.verify(refs))
        if damaged:
            _log.error("%d blocks that records share are damaged and quarantined", len(damaged))
        self.read_bytes += step_bytes
        return step_bytes / WARM_START_BYTES_PER_S

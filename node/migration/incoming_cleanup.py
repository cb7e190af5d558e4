"""Cleanup of incoming moves that end: pins are released, aborted moves are refused from then on."""

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from fabric.errors import UNDECIDED
from fabric.ids import AgentKey, MigrationId
from fabric.kvcache.block_chain import BlockRef
from fabric.ports import Clock
from fabric.record.manifest import Manifest, OwnerState
from node.engine.moving_streams import MovingStreams
from node.migration.incoming import IncomingMoves
from node.migration.warm_up import WarmUp
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.posix_disk import DiskError
from node.store.tombstones import TombstoneStore

_log = logging.getLogger(__name__)

STALE_S = 3_600.0  # time without a new block after which its router is gone


@dataclass(frozen=True, slots=True)
class IncomingCleanup:
    """Cleanup of incoming moves: aborts them and releases their blocks."""

    clock: Clock
    moves: IncomingMoves
    warm_up: WarmUp
    store: AgentStore
    workers: Workers
    erased: TombstoneStore
    moving: MovingStreams

    async def abort(self, name: MigrationId, key: AgentKey) -> None:
        """Abort a migration: release what it holds, and refuse to commit it later.

        Raises DiskError with the code UNDECIDED if its record may be on disk.
        """
        async with self.moves.decision_lock(key):  # waits for a running commit
            self.moves.abort(name)
            self.warm_up.drop(name)
            self.moving.end_pause(name)
            self.moves.notify_decided(name)
            await self.release_pins(name, ())
            await self._undo(name, key)

    async def abort_if_given_up(self, name: MigrationId, record: Manifest) -> None:
        """Clean up a migration whose blocks arrived after it was aborted or its agent erased."""
        key = record.key
        if self.moves.is_aborted(name) or self.erased.is_erased(key, record.epoch):
            await self.abort(name, key)

    async def abort_agent(self, key: AgentKey) -> bool:
        """Abort all moves that hold blocks of an agent; return whether there were any."""
        names = [move.name for move in self.moves if move.refs and move.key == key]
        for name in names:
            await self.abort(name, key)
        return bool(names)

    async def abort_stale(self, idle_s: float = STALE_S) -> int:
        """Abort migrations whose router is gone: no block has arrived for `idle_s` seconds."""
        now_s = self.clock.monotonic_s()
        stale = [move for move in self.moves if move.refs and now_s - move.at_s >= idle_s]
        for move in stale:
            assert move.key is not None, "a move with blocks has an agent"
            try:
                await self.abort(move.name, move.key)
            except DiskError as error:
                _log.error("cannot tell whether a move was committed: %s", error.message)
        return len(stale)

    async def release_pins(self, name: MigrationId, kept: Iterable[BlockRef]) -> None:
        """Release the pins of a migration's blocks, except those that its record refers to."""
        move = self.moves.get(name)
        if move is None:
            return
        pins, move.refs = Counter(move.refs), []
        self.moves.discard_if_empty(move)
        pins.subtract(set(kept))
        if not +pins:
            return
        while pins := +pins:  # a repeated call may have pinned a block twice
            self.store.blocks.abandon(pins)
            pins.subtract(list(pins))
        with suppress(DiskError):  # unneeded blocks may stay until a later sweep
            await self.workers.run(self.store.blocks.sweep)

    async def _undo(self, name: MigrationId, key: AgentKey) -> None:
        """Remove the record of a failed commit, so that no restart finds it."""
        doubtful = self.store.doubtful_record(key)
        if doubtful is None or (doubtful.migration, doubtful.state) != (name, OwnerState.OWNED):
            return
        if not await self.workers.run(lambda: self.store.settle(key)):
            message = "cannot tell whether the move was committed: the disk cannot be read"
            error = DiskError(message)
            error.code = UNDECIDED
            raise error

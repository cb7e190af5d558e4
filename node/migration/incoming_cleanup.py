"""How moves to this node end: what they brought is let go of, and perhaps refused from then on."""

import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from fabric.errors import UNDECIDED
from fabric.ids import AgentKey, MigrationId
from fabric.kvcache.block import BlockRef
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

ADOPTED_S = 3_600.0  # without a new block for so long, no copy of that move goes on


@dataclass(frozen=True, slots=True)
class IncomingCleanup:
    """Ends incoming moves and releases what they hold."""

    clock: Clock
    moves: IncomingMoves
    warm_up: WarmUp
    store: AgentStore
    workers: Workers
    erased: TombstoneStore
    moving: MovingStreams

    async def forget(self, name: MigrationId, key: AgentKey) -> None:
        """Let go of a migration that came to nothing, and refuse to commit it later.

        Raises DiskError with the code UNDECIDED where its record may be the one that is stored.
        """
        async with self.moves.deciding(key):  # a commit under way ends first: it is told of then
            self.moves.abort(name)
            self.warm_up.drop(name)
            self.moving.go_on(name)
            self.moves.decide(name)
            await self.let_go(name, ())
            await self._undo(name, key)

    async def forget_if_given_up(self, name: MigrationId, record: Manifest) -> None:
        """Let go of what came after a move was given up, or its agent erased."""
        key = record.key
        if self.moves.is_aborted(name) or record.epoch <= self.erased.floor(*key):
            await self.forget(name, key)

    async def forget_agent(self, key: AgentKey) -> bool:
        """Let go of all that moves have brought of one agent; say whether there was anything."""
        coming = [move.name for move in self.moves if move.refs and move.key == key]
        for name in coming:
            await self.forget(name, key)
        return bool(coming)

    async def forget_stale(self, idle_s: float = ADOPTED_S) -> int:
        """Let go of migrations whose router is gone: nothing came for `idle_s` seconds."""
        now_s = self.clock.monotonic_s()
        stale = [move for move in self.moves if move.refs and now_s - move.at_s >= idle_s]
        for move in stale:
            assert move.key is not None, "its blocks are an agent's"
            try:
                await self.forget(move.name, move.key)
            except DiskError as error:
                _log.error("a move stays in doubt: %s", error.message)
        return len(stale)

    async def let_go(self, name: MigrationId, kept: Iterable[BlockRef]) -> None:
        """Take back the pins of what a migration brought, but for those its record has taken."""
        move = self.moves.get(name)
        if move is None:
            return
        pins, move.refs = Counter(move.refs), []
        self.moves.tidy(move)
        pins.subtract(set(kept))
        if not +pins:
            return
        while pins := +pins:  # a call that came twice has pinned twice
            self.store.blocks.abandon(pins)
            pins.subtract(list(pins))
        with suppress(DiskError):  # what nobody needs may stay a while
            await self.workers.run(self.store.blocks.sweep)

    async def _undo(self, name: MigrationId, key: AgentKey) -> None:
        """Make sure that no restart finds the record of a commit that failed."""
        doubted = self.store.doubted(key)
        if doubted is None or (doubted.migration, doubted.state) != (name, OwnerState.OWNED):
            return
        if not await self.workers.run(lambda: self.store.settle(key)):
            message = "nobody can say whether the move was committed: the disk refuses to tell"
            failure = DiskError(message)
            failure.code = UNDECIDED
            raise failure

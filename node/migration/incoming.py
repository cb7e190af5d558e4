"""Moves and copies on their way to this node: one object with everything known about each.

    copying ──▶ committing ──▶ committed          a failed commit may be repeated
       └───────────┴──▶ aborted                   final: it is remembered and refused

Turns may arrive before their agent: a client that continues a stream here arrives while the move
is still being committed. Such turns wait until the move is decided; meanwhile they have been
received, parsed and rendered.
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from weakref import WeakValueDictionary

from fabric.errors import RetryElsewhereError
from fabric.ids import AgentKey, MigrationId, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from fabric.record.piece_table import PieceTable
from node.engine.memory_budget import Reservation
from node.limits import ABORTED_MOVES_MAX
from node.mlx.resident_cache import ResidentCache
from node.runtime.one_loop import of_one_loop, on_its_loop

HANDOVER_WAIT_S: Final = 30.0


class IncomingState(Enum):
    """Progress of an incoming move."""

    COPYING = "copying"  # blocks arrive; another node owns the agent
    COMMITTING = "committing"  # all blocks have arrived; the record is being published
    COMMITTED = "committed"  # the agent is this node's
    ABORTED = "aborted"  # a commit is refused


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class WarmCache:
    """The part of a moving agent's cache that is already in memory.

    While blocks are read into it, its memory is reserved and may not be dropped; `cancel` stops
    the reading after the current block.
    """

    reservation: Reservation
    cache: ResidentCache | None = None
    room_tokens: int = 0
    full: PieceTable = field(default_factory=PieceTable)  # loaded full blocks
    tokens_count: int = 0  # set once the whole final record is loaded
    kept_as: int = 0  # number in order of keeping: the lowest is the oldest
    cancel: threading.Event = field(default_factory=threading.Event)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the cache holds."""
        return self.cache.size_bytes if self.cache is not None else 0

    def begins(self, record: Manifest) -> bool:
        """Return whether the cache holds the first blocks of the record."""
        return record.pieces.tokens_in_common(self.full) == self.full.tokens_count


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class IncomingMove:
    """An incoming move or copy; used on the node's event loop only."""

    name: MigrationId
    state: IncomingState = IncomingState.COPYING
    key: AgentKey | None = None  # agent whose blocks have arrived
    refs: list[BlockRef] = field(default_factory=list)  # pinned blocks without a record
    at_s: float = 0.0  # when the last block arrived
    warm: WarmCache | None = None  # loaded part of the cache
    loading: list[WarmCache] = field(default_factory=list)  # caches being loaded
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    waiting_count: int = 0  # turns that wait for its outcome

    @property
    def is_empty(self) -> bool:
        """Return whether the move holds no blocks and no cache, and no turn waits for it."""
        return not (self.refs or self.warm or self.loading or self.waiting_count)


class IncomingMoves:
    """All incoming moves of a node; used on its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moves: dict[MigrationId, IncomingMove] = {}
        self._copying: Counter[TenantId] = Counter()
        self._deciding: WeakValueDictionary[AgentKey, asyncio.Lock] = WeakValueDictionary()

    def __iter__(self) -> Iterator[IncomingMove]:
        return iter(list(self._moves.values()))

    def get(self, name: MigrationId) -> IncomingMove | None:
        """Return a tracked move, or None."""
        return self._moves.get(name)

    @on_its_loop
    def get_or_create(self, name: MigrationId) -> IncomingMove:
        """Return a move; start tracking it if it is new."""
        return self._moves.setdefault(name, IncomingMove(name))

    @on_its_loop
    def discard_if_empty(self, move: IncomingMove) -> None:
        """Stop tracking an empty move, unless it was aborted or is being committed."""
        if move.is_empty and move.state not in {IncomingState.ABORTED, IncomingState.COMMITTING}:
            self._moves.pop(move.name, None)

    def decision_lock(self, key: AgentKey) -> asyncio.Lock:
        """Return the lock under which commits, aborts and kept copies of one agent are decided."""
        return self._deciding.setdefault(key, asyncio.Lock())

    @on_its_loop
    def add_block(self, name: MigrationId, key: AgentKey, ref: BlockRef) -> None:
        """Add a block that has arrived and is pinned for this move."""
        move = self.get_or_create(name)
        move.key, move.at_s = key, self._clock.monotonic_s()
        move.refs.append(ref)

    @contextmanager
    def copying(self, tenant: TenantId) -> Iterator[None]:
        """Count a copy of a tenant's blocks as in progress, even before its first block arrives."""
        self._copying[tenant] += 1
        try:
            yield
        finally:
            self._copying[tenant] -= 1
            self._copying += Counter()  # drops zero counts

    def has_unrecorded_blocks(self, tenant: TenantId) -> bool:
        """Return whether a tenant has blocks here, or arriving, that no record refers to yet.

        They count as private until their record arrives.
        """
        tenants = (
            move.key[0] for move in self._moves.values() if move.refs and move.key is not None
        )
        return tenant in self._copying or tenant in tenants

    def is_aborted(self, name: MigrationId) -> bool:
        """Return whether a move was aborted."""
        move = self._moves.get(name)
        return move is not None and move.state is IncomingState.ABORTED

    @on_its_loop
    def abort(self, name: MigrationId) -> None:
        """Mark a move as aborted; the caller releases what it holds."""
        move = self.get_or_create(name)
        if move.state is not IncomingState.ABORTED:
            move.state = IncomingState.ABORTED
            self._moves[name] = self._moves.pop(name)  # the latest is last
        aborted = [move for move in self if move.state is IncomingState.ABORTED]
        for move in aborted[:-ABORTED_MOVES_MAX]:
            if move.is_empty:
                del self._moves[move.name]

    # --- turns that arrive before their agent ------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """Number of turns that wait for moves."""
        return sum(move.waiting_count for move in self)

    @on_its_loop
    def notify_decided(self, name: MigrationId) -> None:
        """Wake the turns that wait for this move: it was committed, refused or aborted."""
        move = self._moves.get(name)
        if move is not None and move.waiting_count:
            move.decided.set()

    async def wait_until_decided(self, name: MigrationId) -> None:
        """Wait until a move is decided; raise RetryElsewhereError after HANDOVER_WAIT_S."""
        move = self.get_or_create(name)
        move.waiting_count += 1
        try:
            await asyncio.wait_for(move.decided.wait(), HANDOVER_WAIT_S)
        except TimeoutError:
            message = f"the agent has not arrived within {HANDOVER_WAIT_S:g} s"
            raise RetryElsewhereError(message) from None
        finally:
            move.waiting_count -= 1
            if not move.waiting_count:
                move.decided = asyncio.Event()  # later turns wait for the next decision
            self.discard_if_empty(move)

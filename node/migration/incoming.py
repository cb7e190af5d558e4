"""Moves and copies on their way to this node: one object for all that is known of each.

    copying ──▶ committing ──▶ committed          a commit that fails may come again
       └───────────┴──▶ aborted                   for good: it is remembered and refused

Turns may come ahead of their agent: whoever continues a stream here is on the way while the
move is still committed. They wait until it is decided; by then they have been received, parsed
and rendered.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final
from weakref import WeakValueDictionary

from fabric.errors import RetryElsewhereError
from fabric.ids import AgentKey, MigrationId, TenantId
from fabric.kvcache.block import BlockRef
from fabric.ports import Clock
from node.limits import ABORTED_MOVES_MAX
from node.migration.warm_cache import WarmCache
from node.runtime.one_loop import of_one_loop, on_its_loop

HANDOVER_WAIT_S: Final = 30.0


class IncomingState(Enum):
    """Progress of an incoming move."""

    COPYING = "copying"  # blocks arrive; the agent is another node's
    COMMITTING = "committing"  # all have arrived: its record is being published
    COMMITTED = "committed"  # the agent is this node's
    ABORTED = "aborted"  # it came to nothing, and is not committed any more


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class IncomingMove:
    """An incoming move or copy; used on the node's event loop only."""

    name: MigrationId
    state: IncomingState = IncomingState.COPYING
    key: AgentKey | None = None  # of the agent whose blocks have come
    refs: list[BlockRef] = field(default_factory=list)  # pinned blocks that no record refers to
    at_s: float = 0.0  # when one last came
    warm: WarmCache | None = None  # what is in memory of it
    loading: list[WarmCache] = field(default_factory=list)  # and what is being read
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    waiting_count: int = 0  # turns that came ahead of it

    @property
    def is_empty(self) -> bool:
        """Say whether it holds nothing, and nobody waits for it."""
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
        """Return what is known of a move, if anything is."""
        return self._moves.get(name)

    @on_its_loop
    def of(self, name: MigrationId) -> IncomingMove:
        """Return a move, of which perhaps nothing has come yet."""
        return self._moves.setdefault(name, IncomingMove(name))

    @on_its_loop
    def tidy(self, move: IncomingMove) -> None:
        """Forget a move that holds nothing any more, and that nothing is to be known of."""
        if move.is_empty and move.state not in {IncomingState.ABORTED, IncomingState.COMMITTING}:
            self._moves.pop(move.name, None)

    def deciding(self, key: AgentKey) -> asyncio.Lock:
        """Return the lock under which commits, aborts and kept copies of one agent are decided."""
        return self._deciding.setdefault(key, asyncio.Lock())

    @on_its_loop
    def note_block(self, name: MigrationId, key: AgentKey, ref: BlockRef) -> None:
        """Note that a block has come, and is pinned for this move."""
        move = self.of(name)
        move.key, move.at_s = key, self._clock.monotonic_s()
        move.refs.append(ref)

    @contextmanager
    def copying(self, tenant: TenantId) -> Iterator[None]:
        """Let it be known that blocks of a tenant come, also those that nobody noted yet."""
        self._copying[tenant] += 1
        try:
            yield
        finally:
            self._copying[tenant] -= 1
            self._copying += Counter()  # zeros go

    def is_bringing(self, tenant: TenantId) -> bool:
        """Say whether blocks of a tenant are here that no record has yet.

        Whom they are for is said with the record: until then they are for nobody else.
        """
        held = (move.key[0] for move in self._moves.values() if move.refs and move.key is not None)
        return tenant in self._copying or tenant in held

    def is_aborted(self, name: MigrationId) -> bool:
        """Say whether a move came to nothing for good."""
        move = self._moves.get(name)
        return move is not None and move.state is IncomingState.ABORTED

    @on_its_loop
    def abort(self, name: MigrationId) -> None:
        """Let a move not come again; what it holds is the caller's to take back."""
        move = self.of(name)
        if move.state is not IncomingState.ABORTED:
            move.state = IncomingState.ABORTED
            self._moves[name] = self._moves.pop(name)  # the latest comes last
        aborted = [move for move in self if move.state is IncomingState.ABORTED]
        for move in aborted[:-ABORTED_MOVES_MAX]:
            if move.is_empty:
                del self._moves[move.name]

    # --- turns that come ahead of their agent ------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """Turns that wait."""
        return sum(move.waiting_count for move in self)

    @on_its_loop
    def decide(self, name: MigrationId) -> None:
        """Wake who waits for this move: it was committed, refused or forgotten."""
        move = self._moves.get(name)
        if move is not None and move.waiting_count:
            move.decided.set()

    async def wait(self, name: MigrationId) -> None:
        """Wait until a move is decided; raise RetryElsewhereError if that lasts too long."""
        move = self.of(name)
        move.waiting_count += 1
        try:
            await asyncio.wait_for(move.decided.wait(), HANDOVER_WAIT_S)
        except TimeoutError:
            message = f"the agent has not arrived within {HANDOVER_WAIT_S:g} s"
            raise RetryElsewhereError(message) from None
        finally:
            move.waiting_count -= 1
            if not move.waiting_count:
                move.decided = asyncio.Event()  # who comes later waits for the next decision
            self.tidy(move)

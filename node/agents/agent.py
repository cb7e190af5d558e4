"""An agent on its node: the last committed record, and the resident cache while it is hot."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from fabric.control.directive_calls import directive_view
from fabric.control.node_calls import AgentView, LastMatch, SealAgent, TierBytes
from fabric.errors import RetryLaterError
from fabric.ids import AgentKey, MigrationId
from fabric.kvcache.block_chain import BlockSpan
from fabric.record.directive import live_directives
from fabric.record.edited_head import EditedHead
from fabric.record.layout import Layout
from fabric.record.lenders import Lender
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.turn_history import last_turn
from node.agents.outgoing import OutgoingMove, OutgoingState, Successor
from node.limits import EDITS_SHOWN_MAX
from node.mlx.resident_cache import ResidentCache
from node.runtime.one_loop import of_one_loop

TAIL_BYTES = 8


class TurnLock(asyncio.Lock):
    """Lock of an agent for one turn or one change of its record.

    It counts as locked while any task waits. So a task that finds it free gets it without waiting,
    and its earlier checks still hold.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting_count = 0

    async def acquire(self) -> Literal[True]:
        """Wait for the lock."""
        self._waiting_count += 1
        try:
            return await super().acquire()
        finally:
            self._waiting_count -= 1

    @asynccontextmanager
    async def held(
        self, within_s: float, busy: str = "a turn of this agent is still running"
    ) -> AsyncIterator[None]:
        """Hold the lock; raise RetryLaterError with message `busy` if it is not free in time."""
        try:
            async with asyncio.timeout(within_s):  # unlike `wait_for`, does not yield if free
                await self.acquire()
        except TimeoutError:
            raise RetryLaterError(busy, code="agent_busy") from None
        try:
            yield
        finally:
            self.release()

    def locked(self) -> bool:
        """Return whether a task holds the lock or waits for it."""
        return self._waiting_count > 0 or super().locked()


class LiveTurn(Protocol):
    """Operations on an agent's running turn."""

    saved: asyncio.Event

    @property
    def lenders(self) -> tuple[Lender, ...]:
        """Agents whose rows its cache borrowed."""
        ...

    def cancel(self) -> None:
        """End the turn as if its client had disconnected."""
        ...

    def hand_over(self, seal: SealAgent) -> None:
        """Stop at the next token; another node continues the answer."""
        ...

    async def keep(self, migration: MigrationId) -> None:
        """Continue the answer here after a failed move."""
        ...

    async def save_now(self) -> Manifest | None:
        """Save the full blocks computed so far."""
        ...


@dataclass(frozen=True, slots=True)
class Loading:
    """Load of an agent's KV cache from disk; `cancel` ends it after the current block."""

    task: asyncio.Task[None]
    cancel: threading.Event


@dataclass(frozen=True, slots=True, eq=False)
class PausedAnswer:
    """An answer that stopped between two tokens; no other turn begins until it is resumed."""

    epoch: int  # the agent's; at a different epoch, another node resumes the answer
    is_resumed: asyncio.Event = field(default_factory=asyncio.Event)


@of_one_loop
@dataclass(slots=True, eq=False, weakref_slot=True)
class Agent:
    """Mutable state of one agent; used on the node's event loop only."""

    manifest: Manifest
    saved: Manifest | None = None  # record on disk; older than `manifest` if a save failed
    cache: ResidentCache | None = None  # holds exactly the manifest's tokens while idle
    is_durable: bool = False
    stored_tokens: int = 0  # leading tokens whose rows in memory equal the blocks of `saved`
    named: tuple[Sequence[int], tuple[BlockSpan, ...]] = ((), ())  # tokens, and their block names
    layout: Layout | None = None  # layout of an edited cache that could not be saved
    was_evicted: bool = False  # evicted while turns waited: they look up their agent again
    is_pin_held: bool = False  # the pin is honored: it fits its tenant's part
    came_from_peer: bool = False  # moved here, and no turn has run here yet
    is_superseded: bool = False  # the starting turn's form supersedes its own
    is_taken_over: bool = False  # by the starting turn; the lost owner may have run later turns
    last_match: LastMatch | None = None
    turn_lock: TurnLock = field(default_factory=TurnLock)
    waiting_count: int = 0  # turns that wait for the lock; other operations are not counted
    turn: LiveTurn | None = None  # the running turn
    outgoing: OutgoingMove = field(init=False)
    paused_answer: PausedAnswer | None = None  # its last answer, if this node resumes it
    loading: Loading | None = None  # prefetch of its cache from disk

    def __post_init__(self) -> None:
        """Set the outgoing move's state from the record: SEALED or HERE."""
        is_sealed = self.manifest.state is OwnerState.SEALED
        self.outgoing = OutgoingMove(OutgoingState.SEALED if is_sealed else OutgoingState.HERE)

    @property
    def key(self) -> AgentKey:
        return self.manifest.key

    @property
    def successor(self) -> Successor | None:
        """Return the agent's new owner, if its record does not name it yet."""
        successor = self.outgoing.successor
        is_newer = successor is not None and successor.epoch > self.manifest.epoch
        return successor if is_newer else None

    @property
    def effective_record(self) -> Manifest:
        """Return the record as it applies now: a replica's if another node owns the agent.

        `manifest` may lag: until the disk accepts the release, it claims an epoch below the fence.
        """
        owner, record = self.successor, self.manifest
        return record if owner is None else record.as_replica(owner.node, owner.epoch)

    @property
    def is_busy(self) -> bool:
        return self.turn_lock.locked() or self.waiting_count > 0

    @property
    def is_blank(self) -> bool:
        """Return whether the agent has no tokens and no record."""
        return self.saved is None and not self.manifest.token_ids

    def end_paused_answer(self) -> None:
        """Forget the paused answer, which was resumed or is no longer wanted."""
        if self.paused_answer is not None:
            self.paused_answer.is_resumed.set()
            self.paused_answer = None

    @property
    def is_unsaved(self) -> bool:
        """Return whether memory holds turns that are not on disk."""
        owned = self.manifest.state is OwnerState.OWNED
        return owned and self.cache is not None and not self.is_durable

    def take_record(self, record: Manifest) -> None:
        """Note that the disk holds `record`; keep a pin that was set in the meantime."""
        pinned = self.manifest.pinned
        self.saved, self.layout = record, None
        self.manifest = record if record.pinned == pinned else replace(record, pinned=pinned)

    def note_saved(self, record: Manifest, spans: tuple[BlockSpan, ...]) -> None:
        """Note that the disk holds `record`, with the blocks that memory holds."""
        self.take_record(record)
        if record.state is OwnerState.SEALED:
            self.outgoing.note_sealed()
        self.is_durable = True
        self.stored_tokens = record.tokens_count
        self.named = (record.token_ids, spans)

    @property
    def is_private(self) -> bool:
        """Return whether its blocks are private, or were in the last saved record."""
        return self.manifest.is_private or (self.saved is not None and self.saved.is_private)

    def chain(self) -> tuple[BlockSpan, ...]:
        """Return the names of the blocks of the record's tokens, if they are known."""
        ids, spans = self.named
        return spans if ids is self.manifest.token_ids else ()

    @property
    def edited(self) -> Layout | EditedHead | None:
        """Return the layout or record of the edits of its cache, if it is edited."""
        return self.layout or (self.saved.edited if self.saved is not None else None)

    @property
    def lenders(self) -> tuple[Lender, ...]:
        """Return the agents whose rows its cache, its record or its running turn borrowed."""
        running = self.turn.lenders if self.turn is not None else ()
        unsaved = self.layout.lenders if self.layout is not None else ()
        head = self.saved.edited if self.saved is not None else None
        return (*unsaved, *(head.known_lenders if head is not None else ()), *running)

    @property
    def exact_tokens(self) -> int:
        """Leading tokens of the cache before its first edit."""
        edited = self.edited
        return edited.exact_tokens if edited is not None else self.manifest.tokens_count

    @property
    def hot_bytes(self) -> int:
        """Memory held by the resident cache."""
        return self.cache.size_bytes if self.cache is not None else 0

    @property
    def conversation_bytes(self) -> bytes:
        """Text of the last prompt up to where its answer opens.

        The opening is left out because a later prompt may open the answer differently.
        """
        record = self.manifest
        count = record.provenance.marks.conversation or record.prompt_tokens_count
        count = min(count, record.prompt_tokens_count)
        return record.text.encode()[: record.token_ends[count - 1]] if count else b""

    @property
    def _tail(self) -> str:
        pieces = self.saved.pieces if self.saved is not None else ()
        return pieces[-1].block.block_hash[:TAIL_BYTES].hex() if pieces else ""

    def view(self) -> AgentView:
        record, edited = self.effective_record, self.edited
        tiers = [name for name, has in (("hot", self.cache), ("disk", self.saved)) if has]
        return AgentView(
            tenant=record.tenant,
            agent=record.agent,
            group=record.group,
            node=record.owner,
            state=record.state,
            epoch=record.epoch,
            revision=record.revision,
            tokens=record.tokens_count,
            blocks=len(self.saved.pieces) if self.saved else 0,
            bytes=TierBytes(hot=self.hot_bytes, disk=self.saved.stored_bytes if self.saved else 0),
            tiers=tuple(tiers),
            busy=self.is_busy,
            created_s=record.created_s,
            used_s=record.used_s,
            last_match=self.last_match or _last_match(record),
            sealed_to=record.sealed_to,
            migration=record.migration,
            durable=self.is_durable,
            pinned=record.pinned,
            pin_held=record.pinned and self.is_pin_held,
            kept=record.state is OwnerState.REPLICA and record.provenance.is_kept,
            tail=self._tail,
            exact_tokens=edited.exact_tokens if edited is not None else None,
            edits=edited.notes[-EDITS_SHOWN_MAX:] if edited is not None else (),
            directives=tuple(map(directive_view, live_directives(record.directives))),
            settings=record.settings,
            branches=len(record.branches) if record.branches else None,
        )


def _last_match(record: Manifest) -> LastMatch | None:
    """Return the last prompt's match from the turn history, for use after a start or a move."""
    turn = last_turn(record.provenance.turns)
    if turn is None:
        return None
    return LastMatch(turn.match, turn.cached_tokens, turn.prompt_tokens, turn.reason)

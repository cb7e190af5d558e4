"""Heads of turns: blocks of a prompt that other turns may wait for, and may borrow meanwhile.

Once a block is awaited, the turn that computes it publishes it (`node/turn/saver.py`), and the
engine resumes the turns that wait for it (`node/engine/heads.py`). No record refers to it yet.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from fabric.edit_mode import EditMode
from fabric.ids import BlockHash, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.record.edited_head import Origin
from fabric.record.layout import EMPTY_LAYOUT, Held, Layout
from fabric.record.piece_table import Piece
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import CacheTier, GenerateRequest
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.engine.sequence import Head
from node.limits import HEAD_TOKENS_MIN
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.record_writer import NamedBlock
from node.turn.prepared import Prepared, stored_prefix


class TurnHeads:
    """Heads of a node's turns; used on its event loop."""

    def __init__(
        self, store: AgentStore, workers: Workers, health: Health, *, exact_chunks: bool
    ) -> None:
        """Share whole blocks only if prompts are computed on the grid of blocks."""
        self._exact = exact_chunks
        self.store = store
        self.workers = workers
        self.health = health
        self.ends_count = 0  # ended turns; each may have stored more blocks
        self._lent: dict[Head, tuple[NamedBlock, ...]] = {}
        self._running: dict[Head, Agent] = {}
        self._waiting: set[Head] = set()
        self._kept: dict[BlockHash, list[BlockRef]] = {}  # by the first block's name
        self.news = asyncio.Event()  # set and replaced when a turn begins, publishes or ends

    async def of(self, agent: Agent, prepared: Prepared, request: GenerateRequest) -> Head | None:
        """Return the head of a turn's prompt; None if it shares nothing.

        Tokens after an edit are never shared, nor is anything that a private agent computes.
        """
        layout, ids = prepared.layout, prepared.plan.ids[:-1]
        is_plain = not (layout.head_tokens or prepared.moves or request.is_scored)
        is_begun = request.resume is not None  # its client waits for the next token
        if is_begun or not (is_plain and self.health.reuses and len(ids) >= BLOCK_TOKENS):
            return None
        tenant, same_tokens = agent.manifest.tenant, prepared.plan.kept_tokens
        known_spans = agent.chain()
        spans = await self.workers.run(
            lambda: self.store.spans(tenant, ids, known_spans, min(same_tokens, len(ids)))
        )
        has_states = CacheGroup.STATE in self.store.spec.groups
        return Head(
            ids=ids,
            names=tuple(span.block_hash for span in spans if span.is_full),
            stored_tokens=prepared.cached,
            leads=request.is_kept and not agent.is_private,
            waits=prepared.is_stored and request.edits is not EditMode.ANYWHERE,
            has_states=has_states,
            shares_parts=not (has_states or self._exact),
        )

    # --- turns that may wait ------------------------------------------------------------------

    def give_up_shorter_cache(
        self, agent: Agent, prepared: Prepared, head: Head, *, is_lent: bool = False
    ) -> Prepared:
        """Give up a resident cache if a running turn shares more of the prompt than it holds.

        With `is_lent`, another node may share more, as the router reports. The cache's memory must
        not be held during the wait; it is stored, and would be cut to the shared part.
        """
        least_tokens = prepared.cached + HEAD_TOKENS_MIN
        is_less = prepared.cached < BLOCK_TOKENS and (
            is_lent or any(o.leads and head.common_tokens(o) >= least_tokens for o in self._running)
        )
        if prepared.tier is not CacheTier.HOT or not (is_less and agent.is_durable):
            return prepared
        head.waits, head.stored_tokens, is_kept = True, 0, prepared.is_kept
        room = prepared.room_tokens
        return stored_prefix(prepared.plan, EMPTY_LAYOUT, CacheTier.COLD, room, is_kept=is_kept)

    def begin(self, head: Head, agent: Agent) -> None:
        """Note a turn that computes a head, and may wait for blocks of another turn."""
        self._running[head] = agent
        if head.waits:
            self._waiting.add(head)
        self._notify()

    def leads(self, tenant: TenantId, name: BlockHash) -> list[tuple[Head, Agent]]:
        """Return a tenant's running turns with this first block that lend what they compute."""
        return [
            (head, agent)
            for head, agent in self._running.items()
            if head.leads and head.names and head.names[0] == name
            if agent.key[0] == tenant and not agent.is_private
        ]

    def _notify(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def note_start(self, head: Head, prepared: Prepared) -> None:
        """Note the blocks that a turn begins with, for which no other turn needs to wait."""
        stored_tokens = min(prepared.cached, prepared.layout.tokens_count)
        head.published_tokens = stored_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self._stop_waiting(head)
        self._notify()

    def end(self, head: Head) -> None:
        """Note the end of a turn."""
        self.ends_count += 1
        self._running.pop(head, None)
        self.take_back(head)
        self._stop_waiting(head)
        self._notify()

    def _stop_waiting(self, head: Head) -> None:
        self._waiting.discard(head)
        name = head.names[0]
        if name in self._kept and not self._is_awaited(name):
            self.store.blocks.release(self._kept.pop(name))

    def _is_awaited(self, name: BlockHash) -> bool:
        return any(head.names[0] == name for head in self._waiting)

    # --- blocks that are published before a record refers to them ----------------------------

    def lend(self, head: Head, blocks: Iterable[NamedBlock]) -> None:
        """Lend all blocks that a turn has published so far to others of its tenant."""
        self._lent[head] = tuple(blocks)
        self._notify()

    def take_back(self, head: Head) -> None:
        """Stop lending a turn's blocks; its record refers to them now, if it has one."""
        self._lent.pop(head, None)

    @property
    def lent(self) -> frozenset[BlockRef]:
        """Blocks that running turns lend."""
        return frozenset(ref for blocks in self._lent.values() for _, ref in blocks)

    def with_part(self, tenant: TenantId, shared: Layout, ids: list[int]) -> Layout:
        """Add the part of a lent block that continues `ids` after the layout's whole blocks."""
        start, salt = shared.tokens_count, self.store.salt(tenant)
        parent, most, longest = shared.blocks[-1].block_hash if shared.parts else None, 0, None
        if parent is None or self._exact or shared.states:
            return shared
        for head, blocks in self._lent.items():
            span, ref = blocks[-1]
            if span.parent != parent or span.start != start:
                continue
            tokens = head.ids[start : span.end]
            same = common_prefix(tokens, ids[start:])
            if same > most:
                window = self.store.blocks.find(span.in_group(salt, CacheGroup.WINDOW).block_hash)
                origin = Origin(span.parent, U32s(tokens))
                most, longest = same, Held(Piece(ref, 0, same), origin, window=window)
        return shared if longest is None else replace(shared, parts=(*shared.parts, longest))

    def keep(self, head: Head) -> None:
        """Hold a failed turn's blocks until the turns that may wait for them have started."""
        refs = [ref for _, ref in self._lent.get(head, ())]
        if refs and self._is_awaited(head.names[0]):
            self.store.blocks.hold(refs)
            self._kept.setdefault(head.names[0], []).extend(refs)

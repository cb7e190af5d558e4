"""Prefix cache of a node: the longest reusable prefix of a prompt, resident or stored.

`prepare` finds the prefix without changing any cache. Once the engine has granted the memory,
`begin` (on the engine thread) creates or rewinds the cache, and `restore` reads it from disk.
"""

import threading
from dataclasses import dataclass, replace
from typing import Final

from fabric.control.node_calls import LastMatch
from fabric.edit_mode import EditMode
from fabric.limits import BLOCK_TOKENS
from fabric.record.layout import (
    EMPTY_LAYOUT,
    Layout,
    exact_beginning,
    unedited_layout,
    unedited_pieces,
)
from fabric.record.manifest import Manifest
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    GenerateRequest,
    IdentityKind,
    MatchKind,
)
from fabric.turn.prompt_plan import PromptPlan
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.limits import ROOM_TOKENS
from node.migration.incoming import IncomingMoves
from node.mlx.resident_cache import ResidentCache
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.prefetch import Prefetches
from node.tiers.restore import Restores
from node.tiers.span_leases import SpanLeases
from node.turn.borrowed_spans import BorrowedSpans
from node.turn.edited_prefix import EditedPrefixes
from node.turn.heads import TurnHeads
from node.turn.prepared import Prepared, stored_prefix

_EDITED_AND_LOST: Final = "edited, and nothing after the edit is still stored"
SYSTEM_DIGITS: Final = 12  # digits of the fingerprint, as in OpenAI's `system_fingerprint`


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Finder of the longest reusable prefix of a prompt on this node."""

    identity: NodeIdentity
    store: AgentStore
    workers: Workers
    restores: Restores
    engine: EngineThread
    prefetches: Prefetches
    health: Health
    table: AgentTable
    edited: EditedPrefixes
    borrowed: BorrowedSpans
    moves: IncomingMoves
    leases: SpanLeases
    heads: TurnHeads

    def begin(self, prepared: Prepared) -> ResidentCache:
        """Return the turn's cache, with room for prompt and answer; runs on the engine thread."""
        if prepared.is_stored:
            cache = self.engine.engine.new_cache(prepared.room_tokens)
            cache.keeps_slid = prepared.is_kept and self.health.reuses
            return cache
        cache, grid = prepared.cache, prepared.layout.grid
        if prepared.moves:
            cache.rearrange(prepared.moves, grid)
        else:
            cache.rewind(prepared.cached, grid)
        cache.give_back_room(prepared.room_tokens)
        cache.reserve(prepared.room_tokens)
        return cache

    async def prepare(self, agent: Agent, plan: PromptPlan, request: GenerateRequest) -> Prepared:
        """Find the prefix for `plan`, without changing the agent's cache."""
        room = len(plan.ids) + min(request.sampling.max_tokens, ROOM_TOKENS)
        if request.is_scored:  # reused tokens would have no scores
            return await self._prepare_cold(plan, room, is_kept=request.is_kept)
        await self.prefetches.join(agent)
        prepared = await self._find_reusable(agent, plan, room, request)
        is_named = request.identity.kind is IdentityKind.AGENT and request.resume is None
        if request.edits is EditMode.ANYWHERE and is_named and self.health.reuses:
            return await self.borrowed.prepare(agent, prepared)
        return prepared

    async def _find_reusable(
        self, agent: Agent, plan: PromptPlan, room: int, request: GenerateRequest
    ) -> Prepared:
        """Find the prefix, without borrowing spans from other contexts."""
        # An answer that moved here continues with its edited cache.
        keeps = request.edits is not None and request.edits.keeps
        if (keeps or request.resume is not None) and self.health.reuses:
            edited = await self.edited.prepare(agent, plan, room, is_kept=request.is_kept)
            if edited is None and plan.moves:  # tokens after earlier edits may still be reusable
                plan = _without_moves(plan)
                edited = await self.edited.prepare(agent, plan, room, is_kept=request.is_kept)
            if edited is not None:
                return edited
        if plan.moves:
            plan = _without_moves(plan)
        return await self._find(agent, plan, room, is_kept=request.is_kept)

    async def _find(self, agent: Agent, plan: PromptPlan, room: int, *, is_kept: bool) -> Prepared:
        resident = agent.cache
        usable = self._usable_tokens(agent, plan)
        hot = resident.rewind_point(usable) if resident is not None else 0
        hot = hot if self.identity.usable_prefix(hot) == hot else 0
        stored = None
        # A recurrent model may have an earlier state in memory and a later one on disk. Another
        # conversation may share a longer prefix with this prompt.
        if not hot or hot < usable or len(plan.ids) - hot > BLOCK_TOKENS:
            stored = await self._best_prefix(agent, plan, usable)
        common = max(plan.kept_tokens, stored.common_tokens if stored is not None else 0)
        plan = replace(plan, marks=plan.marks.with_branch(common))
        # Reading a block takes about as long as computing a token.
        if (
            hot
            and resident is not None
            and (stored is None or stored.tokens_count - hot <= hot // BLOCK_TOKENS)
        ):
            layout = unedited_layout(agent.saved, agent.stored_tokens)
            return Prepared(plan, resident, hot, CacheTier.HOT, layout, room, is_kept=is_kept)
        assert stored is not None, "a prefix that is not hot is stored"
        if stored.tokens_count or self.health.reuses:  # if none is stored, some may be stored later
            tier = stored.tier if stored.tokens_count else CacheTier.COLD
            return stored_prefix(plan, stored.layout, tier, room, is_kept=is_kept)
        return await self._prepare_cold(plan, room, is_kept=is_kept)

    async def look_again(self, agent: Agent, prepared: Prepared) -> Prepared:
        """Find blocks that were stored while the turn waited for memory."""
        plan = prepared.plan
        stored = await self._best_prefix(agent, plan, self._usable_tokens(agent, plan))
        if stored.tokens_count <= prepared.cached:
            return prepared
        plan = replace(plan, marks=plan.marks.with_branch(stored.common_tokens))
        layout, cached = stored.layout, stored.tokens_count
        return replace(prepared, plan=plan, layout=layout, cached=cached, tier=stored.tier)

    def _usable_tokens(self, agent: Agent, plan: PromptPlan) -> int:
        """Return how many leading tokens of the prompt the agent's own cache can provide."""
        exact = agent.exact_tokens  # an edited cache serves only turns that request it
        return self.identity.usable_prefix(min(plan.kept_tokens, len(plan.ids) - 1, exact))

    async def _prepare_cold(self, plan: PromptPlan, room: int, *, is_kept: bool) -> Prepared:
        fresh = await self.engine.between_steps(lambda: self.engine.engine.new_cache(0))
        fresh.keeps_slid = is_kept and self.health.reuses
        return Prepared(plan, fresh, 0, CacheTier.COLD, EMPTY_LAYOUT, room, is_kept=is_kept)

    async def restore(
        self,
        agent: Agent,
        prepared: Prepared,
        cache: ResidentCache,
        cancel: threading.Event,
    ) -> Prepared:
        """Read the prefix into the new `cache`, up to the first damaged block.

        Stops reading when `cancel` is set.
        """
        assert prepared.is_stored, "only a stored prefix is restored"
        restored = await self._read(agent, prepared, cache, cancel)
        is_less = restored.reused_tokens < prepared.reused_tokens
        is_own_edit = prepared.layout.is_edited and prepared.plain_plan is None
        if is_less and not is_own_edit and not cancel.is_set():
            plain = replace(prepared, plan=prepared.plain_plan or prepared.plan, plain_plan=None)
            other = await self._other_prefix(agent, plain.plan, restored.reused_tokens)
            if other is not None:
                plain = replace(plain, layout=other.layout, tier=other.tier)
                restored = await self._read(agent, plain, cache, cancel)
        return restored

    async def _other_prefix(
        self, agent: Agent, plan: PromptPlan, reused_tokens: int
    ) -> "_StoredPrefix | None":
        """Find a longer prefix than the restored one, the rest of which is damaged or abandoned."""
        other = await self._best_prefix(agent, plan, self._usable_tokens(agent, plan))
        return other if other.tokens_count > reused_tokens else None

    async def _read(
        self, agent: Agent, prepared: Prepared, cache: ResidentCache, cancel: threading.Event
    ) -> Prepared:
        """Read the layout's blocks into the cache; return the prefix that was restored."""
        tenant, ids, wanted = agent.manifest.tenant, prepared.plan.ids, prepared.layout
        store, refs = self.store, wanted.refs if wanted.is_edited else []
        store.blocks.hold(refs)  # blocks of other agents may be evicted during the read
        try:
            layout = await self.restores.read(tenant, ids, wanted, cache, cancel, fills_holes=True)
        finally:
            store.blocks.release(refs)
            if refs:
                await self.workers.run(store.sweep)
        agent.stored_tokens = self._stored_tokens(agent, prepared, layout)
        restored = replace(prepared, cache=cache, layout=layout, is_stored=False)
        restored = replace(restored, cached=cache.tokens_count)
        return restored if restored.reused_tokens else replace(restored, tier=CacheTier.COLD)

    def _stored_tokens(self, agent: Agent, prepared: Prepared, layout: Layout) -> int:
        """Count the leading tokens of the cache that came from the agent's own saved blocks."""
        if prepared.plain_plan is not None or agent.saved is None:
            return 0
        if prepared.layout.is_edited:
            exact = layout.exact_tokens if layout.is_edited else layout.tokens_count
            return min(agent.stored_tokens, exact)
        return unedited_pieces(agent.saved, layout.tokens_count).tokens_in_common(layout.pieces)

    def admitted(self, agent: Agent, prepared: Prepared) -> Admitted:
        """Record the match on the agent, and return the event that reports it."""
        plan, cached, problem = prepared.plan, prepared.reused_tokens, self.health.problem
        match, reason = plan.match if cached else MatchKind.NONE, plan.reason
        if not prepared.layout.is_edited and cached > plan.kept_tokens:
            match = MatchKind.DIVERGE if match is MatchKind.NONE else match
            reason = f"begins with {cached} tokens of other conversations"
        if problem is not None:
            reason = f"served without reuse: {problem}"
        reason += plan.note
        agent.last_match = LastMatch(match, cached, len(plan.ids), reason)
        agent.came_from_peer = False
        return Admitted(
            agent=agent.manifest.agent,
            node=self.identity.name,
            epoch=agent.manifest.epoch,
            cache=prepared.tier,
            match=match,
            prompt_tokens=len(plan.ids),
            cached_tokens=cached,
            match_reason=reason,
            amortized_tokens=prepared.amortized_tokens,
            fetched_tokens=min(prepared.fetched_tokens, cached) or None,
            system=f"fp_{self.identity.fingerprint.hex()[:SYSTEM_DIGITS]}",
        )

    async def _best_prefix(self, agent: Agent, plan: PromptPlan, usable: int) -> "_StoredPrefix":
        """Choose the best of the agent's record and of records that begin with the same tokens."""
        if not self.health.reuses:
            return _StoredPrefix(EMPTY_LAYOUT, CacheTier.COLD)
        ids, tenant = plan.ids[: len(plan.ids) - 1], agent.manifest.tenant
        # Checked before the search, too, because released blocks can still be found briefly.
        is_hidden = self._hides(agent)
        shared = await self.workers.run(lambda: self.store.shared_prefix(tenant, ids))
        if is_hidden or self._hides(agent):
            most = self.table.count_usable(agent, shared.blocks, self.leases.refs | self.heads.lent)
            shared = shared.cut(most * BLOCK_TOKENS)
        more = self.table.records_beginning_with(agent, shared.blocks)
        shared = self.heads.with_part(tenant, shared, ids)
        tier = CacheTier.PEER if agent.came_from_peer else CacheTier.DISK

        def choose() -> _StoredPrefix:
            prefixes = [] if agent.saved is None else [self._match(agent.saved, plan, usable, tier)]
            prefixes.append(self._stored_prefix(shared, len(ids), CacheTier.DISK))
            if max(prefix.tokens_count for prefix in prefixes) < len(ids):
                prefixes += [self._match(record, plan, len(ids), CacheTier.DISK) for record in more]
            best = max(prefixes, key=lambda prefix: prefix.tokens_count)
            return replace(best, common_tokens=max(prefix.common_tokens for prefix in prefixes))

        return await self.workers.run(choose)

    def _hides(self, agent: Agent) -> bool:
        """Return whether the tenant may have blocks here that this agent must not use."""
        return self.table.has_private(agent) or self.moves.has_unrecorded_blocks(
            agent.manifest.tenant
        )

    def _match(
        self, record: Manifest, plan: PromptPlan, limit: int, tier: CacheTier
    ) -> "_StoredPrefix":
        """Return the stored prefix that a record shares with the prompt, up to `limit` tokens."""
        layout = exact_beginning(record)
        common = common_prefix(plan.ids, list(layout.tokens))
        return self._stored_prefix(layout, min(limit, common), tier)

    def _stored_prefix(self, layout: Layout, limit: int, tier: CacheTier) -> "_StoredPrefix":
        """Return the part of a layout's first `limit` tokens that can be restored from disk."""
        common = layout.cut(limit).tokens_count
        layout = layout.cut(self.identity.usable_prefix(limit))
        if self.identity.settings.exact_chunks:
            states = tuple(state for state in layout.states if state.end % BLOCK_TOKENS == 0)
            layout = replace(layout, states=states)
        layout = layout.stored(set(self.store.blocks.missing(layout.refs)))
        return _StoredPrefix(self.store.restorable(layout), tier, common)


@dataclass(frozen=True, slots=True)
class _StoredPrefix:
    """Stored blocks of a prompt's first tokens."""

    layout: Layout
    tier: CacheTier
    common_tokens: int = 0  # shared by prompt and record; not all may be restorable

    @property
    def tokens_count(self) -> int:
        return self.layout.tokens_count


def _without_moves(plan: PromptPlan) -> PromptPlan:
    return replace(plan, moves=(), match=MatchKind.DIVERGE, reason=_EDITED_AND_LOST)

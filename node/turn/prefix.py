"""Find the longest reusable beginning of a prompt: resident, on disk, or others' blocks.

Nothing is taken, made or read before the engine has granted the memory for it: `prepare` says
what there is, `begin` (on the engine thread) and `restore` make it so.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from fabric.control.node_calls import LastMatch
from fabric.edit_mode import EditMode
from fabric.ids import TenantId
from fabric.limits import BLOCK_TOKENS
from fabric.record.manifest import Manifest
from fabric.turn.generation import (
    Admitted,
    CacheTier,
    GenerateRequest,
    IdentityKind,
    MatchKind,
)
from fabric.turn.prompt_plan import PromptPlan
from fabric.turn.text_match import common_prefix
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
from node.store.available_blocks import AvailableBlocks, available_blocks, exact_beginning
from node.tiers.prefetch import Prefetches
from node.tiers.restore import load_blocks
from node.tiers.span_leases import SpanLeases
from node.turn.borrowed_spans import BorrowedSpans
from node.turn.edited_prefix import EditedPrefixes
from node.turn.prepared import NOT_MADE, CachedPrefix, Prepared

_EDITED_AND_LOST: Final = "edited, and nothing that lies behind it is stored any more"
SYSTEM_DIGITS: Final = 12  # of a fingerprint, as many as OpenAI's have


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Finds the longest reusable prefix of a prompt on this node."""

    identity: NodeIdentity
    store: AgentStore
    workers: Workers
    engine: EngineThread
    prefetches: Prefetches
    health: Health
    table: AgentTable
    edited: EditedPrefixes
    borrowed: BorrowedSpans
    moves: IncomingMoves
    leases: SpanLeases

    def begin(self, prepared: Prepared) -> ResidentCache:
        """Return its cache, with room for prompt and answer; runs on the engine thread."""
        if prepared.source is not None:
            made = self.engine.engine.new_cache(prepared.room_tokens)
            made.keeps_slid = prepared.is_kept and self.health.reuses
            return made
        layout = prepared.layout
        if prepared.moves and layout is not None:
            prepared.cache.rearrange(prepared.moves, layout.grid)
        elif layout is not None:
            prepared.cache.rewind(prepared.cached, layout.grid)
        else:
            prepared.cache.rewind(prepared.cached)
        prepared.cache.give_back_room(prepared.room_tokens)
        prepared.cache.reserve(prepared.room_tokens)
        return prepared.cache

    async def prepare(self, agent: Agent, plan: PromptPlan, request: GenerateRequest) -> Prepared:
        """Find what serves `plan`; the agent's own cache, if it has one, stays as it is."""
        room = len(plan.ids) + min(request.sampling.max_tokens, ROOM_TOKENS)
        if request.is_scored:  # of what is not computed nothing would be known
            return await self._cold(plan, room, is_kept=request.is_kept)
        await self.prefetches.join(agent)
        own = await self._own(agent, plan, room, request)
        is_named = request.identity.kind is IdentityKind.AGENT and request.resume is None
        if request.edits is EditMode.ANYWHERE and is_named and self.health.reuses:
            return await self.borrowed.prepare(agent, own)
        return own

    async def _own(
        self, agent: Agent, plan: PromptPlan, room: int, request: GenerateRequest
    ) -> Prepared:
        """Find what serves without another's memory of something else."""
        # An answer that goes on from elsewhere goes on with the memory that it began with.
        keeps = request.edits is not None and request.edits.keeps
        if (keeps or request.resume is not None) and self.health.reuses:
            edited = await self.edited.prepare(agent, plan, room, is_kept=request.is_kept)
            if edited is None and plan.moves:  # what was kept behind earlier edits may be left
                plan = _without_moves(plan)
                edited = await self.edited.prepare(agent, plan, room, is_kept=request.is_kept)
            if edited is not None:
                return edited
        if plan.moves:
            plan = _without_moves(plan)
        return await self._find(agent, plan, room, is_kept=request.is_kept)

    async def _find(self, agent: Agent, plan: PromptPlan, room: int, *, is_kept: bool) -> Prepared:
        resident = agent.cache
        usable = self._usable(agent, plan)
        hot = resident.rewind_point(usable) if resident is not None else 0
        hot = hot if self.identity.usable_prefix(hot) == hot else 0
        source = None
        # Of a recurrent model an earlier state may be in memory, and a later one on disk; and
        # another conversation may have begun as this one now does.
        if not hot or hot < usable or len(plan.ids) - hot > BLOCK_TOKENS:
            source = await self._best_prefix(agent, plan, usable)
        common = max(plan.kept_tokens, source.common_tokens if source is not None else 0)
        plan = replace(plan, marks=plan.marks.with_branch(common))
        # To read a block takes about as long as to compute a token.
        if (
            hot
            and resident is not None
            and (source is None or source.point - hot <= hot // BLOCK_TOKENS)
        ):
            available = available_blocks(agent.saved, agent.stored_tokens)
            return Prepared(plan, resident, hot, CacheTier.HOT, available, room, is_kept=is_kept)
        assert source is not None, "what is not hot comes from elsewhere"
        if source.point:
            # If this is lost, another record may serve, whose block at the cut is read whole.
            room = max(room, len(source.ids), _block_end(source.point))
            return Prepared(
                plan, NOT_MADE, source.point, source.tier, source.available, room, source, is_kept
            )
        return await self._cold(plan, room, is_kept=is_kept)

    def _usable(self, agent: Agent, plan: PromptPlan) -> int:
        """Return how much of a plan's prompt the agent's own memory may serve."""
        exact = agent.exact_tokens  # what was edited serves whoever asks for that only
        return self.identity.usable_prefix(min(plan.kept_tokens, len(plan.ids) - 1, exact))

    async def _cold(self, plan: PromptPlan, room: int, *, is_kept: bool) -> Prepared:
        fresh = await self.engine.between_steps(lambda: self.engine.engine.new_cache(0))
        fresh.keeps_slid = is_kept and self.health.reuses
        return Prepared(plan, fresh, 0, CacheTier.COLD, AvailableBlocks(), room, is_kept=is_kept)

    async def restore(
        self,
        agent: Agent,
        prepared: Prepared,
        cache: ResidentCache,
        cancel: threading.Event,
    ) -> Prepared:
        """Read the prefix into the new `cache`; what turns out to be damaged is a miss.

        Where `cancel` is set, nothing more is read.
        """
        source = prepared.source
        assert source is not None, "only what is stored is restored"
        if source.layout is None:
            cached = await self._read(agent, source, cache, cancel)
            if cached < source.point and not cancel.is_set():
                other = await self._other_prefix(agent, prepared, cached)
                if other is not None:
                    source, cached = other, await self._read(agent, other, cache, cancel)
            return self._restored(agent, prepared, source, cache, cached)
        restored = await self.edited.restore(agent, prepared, source.layout, cache, cancel)
        is_less = restored.reused_tokens < prepared.reused_tokens
        if source.plain_plan is not None and is_less and not cancel.is_set():
            prepared = replace(prepared, plan=source.plain_plan, layout=None)
            other = await self._other_prefix(agent, prepared, restored.reused_tokens)
            if other is not None:
                cached = await self._read(agent, other, cache, cancel)
                return self._restored(agent, prepared, other, cache, cached)
        return restored

    async def _other_prefix(
        self, agent: Agent, prepared: Prepared, reused_tokens: int
    ) -> CachedPrefix | None:
        """Look for more than what was found again; None where there is none, or no room for it.

        What was lost is damaged, or gone with a turn that was given up.
        """
        plan = prepared.plan
        other = await self._best_prefix(agent, plan, self._usable(agent, plan))
        has_room = len(other.ids) <= prepared.room_tokens
        return other if has_room and other.point > reused_tokens else None

    async def _read(
        self, agent: Agent, prefix: CachedPrefix, cache: ResidentCache, cancel: threading.Event
    ) -> int:
        tenant = agent.manifest.tenant
        return await self.workers.run(lambda: self._load(tenant, prefix, cache, cancel))

    def _restored(
        self,
        agent: Agent,
        prepared: Prepared,
        source: CachedPrefix,
        cache: ResidentCache,
        cached: int,
    ) -> Prepared:
        same = available_blocks(agent.saved, cached).full
        agent.stored_tokens = same.tokens_in_common(source.available.full)
        cache.assume(cached)
        tier = source.tier if cached else CacheTier.COLD
        available = source.available
        return replace(
            prepared, cache=cache, cached=cached, tier=tier, available=available, source=None
        )

    def admitted(self, agent: Agent, prepared: Prepared) -> Admitted:
        """Note and tell how much of the prompt is known already."""
        plan, cached, problem = prepared.plan, prepared.reused_tokens, self.health.problem
        match, reason = plan.match if cached else MatchKind.NONE, plan.reason
        if prepared.layout is None and cached > plan.kept_tokens:
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
            system=f"fp_{self.identity.fingerprint.hex()[:SYSTEM_DIGITS]}",
        )

    async def _best_prefix(self, agent: Agent, plan: PromptPlan, usable: int) -> CachedPrefix:
        """Choose between the agent's own record and what others stored that begins alike."""
        if not self.health.reuses:
            return CachedPrefix(AvailableBlocks(), (), 0, CacheTier.COLD)
        known, tenant = plan.ids[: len(plan.ids) - 1], agent.manifest.tenant
        is_hidden = self._hides(agent)  # before, as what is let go of is found for a moment yet
        shared = await self.workers.run(lambda: self.store.shared_blocks(tenant, known))
        if is_hidden or self._hides(agent):
            lent = self.table.lent(agent, shared.full, self.leases.refs)
            if lent < len(shared.full):
                lent_ids = known[: lent * BLOCK_TOKENS]
                shared = await self.workers.run(lambda: self.store.shared_blocks(tenant, lent_ids))
        alike = self.table.alike(agent, shared.full)
        tier = CacheTier.PEER if agent.came_from_peer else CacheTier.DISK

        def choose() -> CachedPrefix:
            found = [] if agent.saved is None else [self._of(agent.saved, plan, usable, tier)]
            found.append(self._prefix(shared, known, len(known), CacheTier.DISK))
            if max(prefix.point for prefix in found) < len(known):
                found += [self._of(each, plan, len(known), CacheTier.DISK) for each in alike]
            best = max(found, key=lambda prefix: prefix.point)
            return replace(best, common_tokens=max(prefix.common_tokens for prefix in found))

        return await self.workers.run(choose)

    def _hides(self, agent: Agent) -> bool:
        """Say whether there may be blocks of the tenant here that this agent may not begin with."""
        return self.table.has_private(agent) or self.moves.is_bringing(agent.manifest.tenant)

    def _of(self, record: Manifest, plan: PromptPlan, limit: int, tier: CacheTier) -> CachedPrefix:
        """Say how far a record's own blocks serve; its last one need not be full."""
        known, available = exact_beginning(record)
        ids = list(known[: len(plan.ids) + BLOCK_TOKENS])
        limit = min(limit, common_prefix(plan.ids, ids))
        # The block that holds the cut is read whole: its hash covers all its tokens.
        ids = ids[: _block_end(limit)]
        return self._prefix(available, ids, limit, tier)

    def _prefix(
        self, available: AvailableBlocks, ids: Sequence[int], limit: int, tier: CacheTier
    ) -> CachedPrefix:
        if self.identity.settings.exact_chunks:
            available.states = {
                end: ref for end, ref in available.states.items() if end % BLOCK_TOKENS == 0
            }
        available.full = available.full.unedited(_block_end(limit))
        common = min(limit, available.full.tokens_count)
        available = available.without(set(self.store.blocks.missing(available.refs())))
        point = self.store.restore_point(available, ids, self.identity.usable_prefix(limit))
        return CachedPrefix(available, ids, point, tier, common)

    def _load(
        self,
        tenant: TenantId,
        source: CachedPrefix,
        into: ResidentCache,
        cancel: threading.Event,
    ) -> int:
        """Read as much as is good; a failing block may cost the grid of exact chunks, too."""
        available, point = source.available, source.point
        loaded = load_blocks(self.store, tenant, source.ids, available, point, into, cancel=cancel)
        usable = self.identity.usable_prefix(loaded)
        assert usable == loaded or not into.recurrent, "states are restored where they are used"
        return usable


def _block_end(tokens_count: int) -> int:
    """Return where the block ends that holds a cut."""
    return -(-tokens_count // BLOCK_TOKENS) * BLOCK_TOKENS


def _without_moves(plan: PromptPlan) -> PromptPlan:
    return replace(plan, moves=(), match=MatchKind.DIVERGE, reason=_EDITED_AND_LOST)

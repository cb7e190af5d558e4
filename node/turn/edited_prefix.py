"""Prefixes with edits: caches in which the tokens after an edit are kept.

They serve only the agent's own turns that request it; another prompt with the same text is
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fabric.errors import CorruptDataError
from fabric.kvcache.arrangement import Move
from fabric.kvcache.hashing import token_bytes
from fabric.ports import Clock
from fabric.record.edited_head import EditNote, dropped_digest
from fabric.record.layout import Hole, Layout
from fabric.record.manifest import Manifest
from fabric.turn.generation import CacheTier
from fabric.turn.prompt_plan import PromptPlan
from node.agents.agent import Agent
from node.limits import EDIT_WINDOWS_MAX, EDITED_PIECES_MAX
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.turn.prepared import Prepared, stored_prefix


@dataclass(frozen=True, slots=True)
class EditedPrefixes:
    """Finder of the reusable prefix of an edited prompt on this node."""

    store: AgentStore
    workers: Workers
    clock: Clock

    async def prepare(
        self, agent: Agent, plan: PromptPlan, room: int, *, is_kept: bool
    ) -> Prepared | None:
        """Prepare to reuse an edited cache, or to edit one now; return None if there is none."""
        saved = agent.saved
        if saved is None or not (plan.moves or agent.edited):
            return None
        try:
            whole = await self._layout(agent, saved)
        except CorruptDataError:
            return None
        moves = _movable(plan.moves, whole) if len(whole.parts) <= EDITED_PIECES_MAX else ()
        layout = self._cut_layout(whole, agent, plan, moves)
        if layout is None:
            return None
        window_tokens = self.store.spec.window_tokens
        if window_tokens and len(layout.arrangement.ahead) > EDIT_WINDOWS_MAX:
            return None
        plan = replace(plan, marks=plan.marks.with_branch(plan.kept_tokens))
        hot = self._reuse_resident(agent, plan, layout, moves, room, is_kept=is_kept)
        if hot is not None or (agent.cache is not None and agent.layout is not None):
            return hot
        layout = self.store.restorable(layout)
        if not layout.is_edited:
            return None
        tier = CacheTier.PEER if agent.came_from_peer else CacheTier.DISK
        return stored_prefix(plan, layout, tier, room, is_kept=is_kept)

    def _reuse_resident(
        self,
        agent: Agent,
        plan: PromptPlan,
        layout: Layout,
        moves: tuple[Move, ...],
        room: int,
        *,
        is_kept: bool,
    ) -> Prepared | None:
        """Reuse the agent's resident cache; return None if it has none, or if its windows slid."""
        cache = agent.cache
        if cache is None:
            return None
        if plan.moves:
            cached = layout.arrangement.tokens_count
            serves = cache.can_rearrange(moves, layout.grid)
        else:
            cached = min(plan.kept_tokens, len(plan.ids) - 1, cache.tokens_count)
            serves = cache.can_rewind(cached)
        if not serves:
            return None
        return Prepared(
            plan, cache, cached, CacheTier.HOT, layout, room, is_kept=is_kept, moves=moves
        )

    async def _layout(self, agent: Agent, saved: Manifest) -> Layout:
        """Return the layout of the stored part of the agent's cache."""
        if agent.layout is not None:
            return agent.layout
        whole = await self.workers.run(lambda: self.store.layout(saved))
        return whole if agent.cache is None else whole.cut(agent.stored_tokens)

    def _cut_layout(
        self, whole: Layout, agent: Agent, plan: PromptPlan, moves: Sequence[Move]
    ) -> Layout | None:
        """Return the layout of the part that the prompt reuses; None if no edit affects it."""
        if not plan.moves:
            layout = whole.cut(min(plan.kept_tokens, len(plan.ids) - 1, whole.tokens_count))
            return layout if layout.is_edited else None
        if len(moves) < 2 or len(whole.parts) + 2 * len(moves) > EDITED_PIECES_MAX:
            return None
        return whole.moved(moves, self._note_edits(agent, moves))

    def _note_edits(self, agent: Agent, moves: Sequence[Move]) -> tuple[EditNote, ...]:
        """Return one note for each edit between two moves."""
        ids, salt = agent.manifest.token_ids, self.store.salt(agent.manifest.tenant)
        now_s = self.clock.wall_s()
        return tuple(
            EditNote(
                now_s,
                before.end,
                move.start - before.end,
                move.new_start - before.new_end,
                move.end - move.start,
                dropped_digest(salt, token_bytes(ids[before.end : move.start])),
            )
            for before, move in pairwise(moves)
        )


def _movable(moves: Sequence[Move], whole: Layout) -> tuple[Move, ...]:
    """Split moves so that they skip holes, which have no rows to move."""
    movable: list[Move] = []
    for move in moves:
        by = move.new_start - move.start
        for start, end, part in whole.placed():
            first, last = max(move.start, start), min(move.end, end)
            if first >= last or (by and isinstance(part, Hole)):
                continue
            before = movable[-1] if movable else None
            if before is not None and (before.end, before.new_end) == (first, first + by):
                movable[-1] = replace(before, end=last)
            else:
                movable.append(Move(first, last, first + by))
    return tuple(movable)

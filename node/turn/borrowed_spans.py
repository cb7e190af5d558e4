"""Borrowed spans: runs of a prompt that other records of the tenant have at other positions.

    a prompt     | as before | new | their document | new | another one |
    is read      | own       |     | theirs, moved  |     | theirs      |

Their rows were computed in another context. So, like tokens after an edit, they serve only turns
that request it, and the first tokens of each run are recomputed.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from fabric.errors import CorruptDataError
from fabric.ids import AgentKey, TenantId
from fabric.kvcache.arrangement import Move, Range, unshiftable_reason
from fabric.limits import EDIT_SINK_TOKENS
from fabric.ports import Clock
from fabric.record.edited_head import EditNote, dropped_digest
from fabric.record.layout import Held, Layout
from fabric.record.layout_patches import Patch, copied_part, with_patches
from fabric.record.lenders import Lender, are_too_many, merge_lenders
from fabric.record.manifest import Manifest
from fabric.turn.chunks import Tokens, as_tokens
from fabric.turn.generation import CacheTier, MatchKind
from fabric.turn.same_runs import ChunkPlaces, same_runs
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.agents.span_index import Chunk, digest_chunks
from node.limits import EDITED_PIECES_MAX, SPAN_KEPT_TOKENS_MIN
from node.mlx.chat_tokenizer import ChatTokenizer
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.tombstones import TombstoneStore
from node.turn.prepared import Prepared, stored_prefix


@dataclass(frozen=True, slots=True)
class _PatchedLayout:
    """Layout for a prompt, with the number of borrowed tokens and runs."""

    layout: Layout
    borrowed_tokens: int
    runs_count: int


@dataclass(frozen=True, slots=True)
class BorrowedSpans:
    """Finder of spans that a turn may borrow on this node."""

    identity: NodeIdentity
    store: AgentStore
    erased: TombstoneStore
    workers: Workers
    clock: Clock
    table: AgentTable
    tokenizer: ChatTokenizer

    async def prepare(self, agent: Agent, plain: Prepared) -> Prepared:
        """Extend `plain` by borrowed spans; return it unchanged if there are none."""
        why = unshiftable_reason(self.identity.spec)
        if self.identity.spec.window_tokens:
            why = why or "window layers need the tokens before it"
        if why:
            reason = f"{plain.plan.reason}; nothing of other contexts is taken: {why}"
            return replace(plain, plan=replace(plain.plan, reason=reason))
        if agent.cache is not None and not agent.is_durable:
            return plain  # unsaved turns are in memory only
        base = await self.workers.run(lambda: self._base(agent, plain))
        gaps = _gaps(base, len(plain.plan.ids) - 1)
        if not gaps:
            return plain
        await self._catch_up()
        tokens = as_tokens(plain.plan.ids)
        digests = await self.workers.run(lambda: self._digest(agent.key[0], tokens))
        records, hints = self._hints(agent.key[0], digests, gaps)
        if not hints:
            return plain
        patched = await self.workers.run(
            lambda: self._fill_gaps(agent.manifest, base, tokens, gaps, hints, records)
        )
        more = _held_tokens(patched.layout) - plain.reused_tokens
        if not patched.runs_count or more <= SPAN_KEPT_TOKENS_MIN:
            return plain
        return _prepared(plain, patched)

    # --- lookup ------------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Index the records of turns since the last call."""
        spans = self.table.spans
        for record in spans.unread():
            spans.put(record, await self.workers.run(partial(self._read, record)))

    def _read(self, record: Manifest) -> tuple[Chunk, ...]:
        return self._digest(record.tenant, as_tokens(record.token_ids))

    def _digest(self, tenant: TenantId, tokens: Tokens) -> tuple[Chunk, ...]:
        return digest_chunks(self.store.salt(tenant), tokens, self.tokenizer.cut_texts)

    def _hints(
        self, tenant: TenantId, digests: Sequence[Chunk], gaps: Sequence[Range]
    ) -> tuple[dict[AgentKey, Manifest], list[ChunkPlaces[AgentKey]]]:
        """Return the tenant's records with chunks that lie in gaps, and these chunks' positions."""
        records: dict[AgentKey, Manifest] = {}
        lends: dict[AgentKey, bool] = {}
        hints: list[ChunkPlaces[AgentKey]] = []
        for chunk in digests:
            if not any(start < chunk.end and chunk.start < end for start, end in gaps):
                continue
            places = []
            for key, start in self.table.spans.places(chunk.digest):
                holder = self.table.get(key)
                saved = holder.saved if holder is not None else None
                if key[0] != tenant or saved is None:
                    continue
                if key not in lends:
                    lends[key] = self.erased.may_lend(saved)
                if lends[key]:
                    records[key] = saved
                    places.append((key, start))
            if places:
                hints.append(ChunkPlaces(chunk.start, chunk.end, tuple(places)))
        return records, hints

    # --- layout ------------------------------------------------------------------------------

    def _base(self, agent: Agent, plain: Prepared) -> Layout:
        """Return the layout of `plain`, with cut blocks of other agents to be stored again."""
        if plain.layout.is_edited:
            return plain.layout
        own_refs = set(agent.saved.refs) if agent.saved is not None else set()
        layout = plain.layout.cut(plain.cached)
        parts = (p if p.piece.block in own_refs else copied_part(p) for p in layout.held)
        return layout.with_parts(parts)

    def _fill_gaps(
        self,
        own: Manifest,
        base: Layout,
        tokens: Tokens,
        gaps: Sequence[Range],
        hints: Sequence[ChunkPlaces[AgentKey]],
        records: Mapping[AgentKey, Manifest],
    ) -> _PatchedLayout:
        """Fill a layout's gaps with runs of other records, whose tokens are compared."""
        recomputed = self.identity.settings.span_recomputed_tokens
        least = recomputed + SPAN_KEPT_TOKENS_MIN
        tokens_of = {key: as_tokens(record.token_ids) for key, record in records.items()}
        runs = [
            run.without_first(recomputed)
            for run in same_runs(tokens, gaps, hints, tokens_of, least)
        ]
        layouts = dict(self._layouts({run.source: records[run.source] for run in runs}))
        patches = [
            Patch(layouts[run.source], Move(run.start, run.end, run.new_start))
            for run in runs
            if run.source in layouts
        ]
        borrowed_tokens = sum(patch.move.end - patch.move.start for patch in patches)
        lenders = self._lenders(own, (records[run.source] for run in runs))
        notes = self._note_runs(own.tenant, patches)
        patched = with_patches(base, patches, notes, lenders) if patches else base
        if len(patched.parts) > EDITED_PIECES_MAX or are_too_many(patched.lenders):
            return _PatchedLayout(base, 0, 0)
        return _PatchedLayout(patched, borrowed_tokens, len(patches))

    def _lenders(self, own: Manifest, records: Iterable[Manifest]) -> tuple[Lender, ...]:
        """Return the lenders of records: their agents, their rows' series, and their own lenders.

        The agent's own rows are not a loan: a turn that forgets recomputes them.
        """
        lenders: list[Lender] = []
        for record in records:
            lenders += [self.erased.lender(record), self.erased.series(record)]
            lenders += record.edited.known_lenders if record.edited is not None else ()
        own_series = self.erased.series(own)
        return merge_lenders(lender for lender in lenders if lender != own_series)

    def _layouts(self, records: Mapping[AgentKey, Manifest]) -> Iterator[tuple[AgentKey, Layout]]:
        for key, record in records.items():
            try:
                yield key, self.store.layout(record)
            except CorruptDataError:
                continue

    def _note_runs(self, tenant: TenantId, patches: Sequence[Patch]) -> tuple[EditNote, ...]:
        """Return notes of the borrowed runs."""
        now_s, nothing = self.clock.wall_s(), dropped_digest(self.store.salt(tenant), b"")
        moves = [Move(0, 0, 0), *(patch.move for patch in patches)]
        return tuple(
            EditNote(
                now_s,
                move.new_start,
                0,
                move.new_start - before.new_end,
                move.end - move.start,
                nothing,
                is_borrowed=True,
            )
            for before, move in pairwise(moves)
        )


def _prepared(plain: Prepared, patched: _PatchedLayout) -> Prepared:
    reason = (
        f"takes {patched.borrowed_tokens} tokens of other contexts, in {patched.runs_count} runs"
    )
    plan = replace(plain.plan, match=MatchKind.SPANS, reason=reason, moves=())
    return stored_prefix(
        plan,
        patched.layout,
        CacheTier.DISK,
        plain.room_tokens,
        is_kept=plain.is_kept,
        plain_plan=plain.plan,
    )


def _gaps(base: Layout, end: int) -> list[Range]:
    """Return the ranges of a prompt that a layout lacks, except the prompt's first tokens."""
    held = [(start, stop) for start, stop, part in base.placed() if isinstance(part, Held)]
    edges = [(0, EDIT_SINK_TOKENS), *held, (end, end)]
    gaps = ((max(stop, EDIT_SINK_TOKENS), start) for (_, stop), (start, _) in pairwise(edges))
    return [(first, last) for first, last in gaps if last - first > SPAN_KEPT_TOKENS_MIN]


def _held_tokens(layout: Layout) -> int:
    return sum(part.tokens_count for part in layout.parts if isinstance(part, Held))

"""Record writer: store the unsaved blocks of a cache, then the record that refers to them.

    name ─ put … put ─ publish: full blocks, windows, states, record        or abandon

One writer serves one turn, or one later attempt to save what a turn could not. A block counts as
stored only if its bytes are known to be the cache's, not another computation of the same tokens.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar

from fabric.errors import FabricError
from fabric.kvcache.block_chain import BlockRef, BlockSpan
from fabric.kvcache.cache_spec import CacheGroup
from fabric.record.branches import branches_after
from fabric.record.edited_head import EditedHead
from fabric.record.layout import EMPTY_LAYOUT, Layout, NamedHead
from fabric.record.manifest import Manifest, Placed
from fabric.record.piece_table import PieceTable
from fabric.record.state_points import kept_states
from fabric.turn.prompt_plan import PromptMarks
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.engine.engine_thread import EngineThread
from node.limits import HEAD_BYTES_MAX
from node.mlx.resident_cache import ResidentCache
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.tiers.disk_budget import DiskBudget, SaveReservation, record_bytes

T = TypeVar("T")
NamedBlock: TypeAlias = tuple[BlockSpan, BlockRef]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordWriters:
    """The parts of a node that its record writers work with."""

    store: AgentStore
    workers: Workers
    engine: EngineThread
    budget: DiskBudget

    def of_idle(self, agent: Agent, cache: ResidentCache) -> "RecordWriter":
        """Return a writer of an idle agent's cache."""
        count, layout = agent.stored_tokens, agent.layout
        if layout is None and agent.saved is not None:
            layout = self.store.layout_to_read(agent.saved).cut(count).without_needless_head()
        return RecordWriter(self, agent, cache, layout or EMPTY_LAYOUT, count)


def _keep_record(record: Manifest) -> Manifest:
    return record


class RecordWriter:
    """Writer of one agent's cache, which begins with the first `cached` tokens of a layout."""

    def __init__(
        self,
        parts: RecordWriters,
        agent: Agent,
        cache: ResidentCache,
        layout: Layout,
        cached: int,
    ) -> None:
        self._store = parts.store
        self._workers = parts.workers
        self._engine = parts.engine
        self._failures_count = parts.engine.failures_count
        self._agent = agent
        self._cache = cache
        self._cached = cached
        self._begun = layout
        self.layout = layout if layout.head_tokens else None  # layout of an edited cache
        self.head: NamedHead | None = None
        self._lost: set[BlockRef] = set()  # blocks of the layout that are not stored
        self._restored = {ref.block_hash: ref for ref in layout.blocks_after_head}
        self._kept_states = {p.end: p.block for p in layout.states if p.end <= cached}
        self._states: dict[int, BlockRef] = {}
        self._saved: dict[bytes, BlockRef] = {}
        self._held: list[BlockRef] = []
        self._room = SaveReservation(parts.budget, agent.manifest.tenant)
        self.spans = agent.chain()

    async def compute(self, work: Callable[[], T]) -> T:
        """Run `work` on the engine thread; raise EngineFailedError if the cache may be wrong.

        The cache may be wrong from the first device error after this writer was created.
        """
        return await self._engine.compute(work, self._failures_count)

    def abandon(self) -> None:
        """Give up the stored blocks, to which no record will refer."""
        self._store.blocks.abandon(self._saved.values())
        self._release()

    def _release(self) -> None:
        self._room.end()
        self._hold_only(set())

    def _hold_only(self, refs: AbstractSet[BlockRef]) -> None:
        """Release blocks that the record does not need, before the sweep that follows it."""
        self._store.blocks.release(ref for ref in self._held if ref not in refs)
        self._held = [ref for ref in self._held if ref in refs]

    # --- blocks ------------------------------------------------------------------------------

    async def name(self, ids: Sequence[int], same_tokens: int) -> tuple[BlockSpan, ...]:
        """Name the blocks of `ids`, which begin with `same_tokens` of those named before."""
        if not self._held:
            # Other agents may be evicted before the commit, but not the blocks that they share
            # with this cache; this agent's own record keeps its blocks.
            own_refs = {id(ref) for ref in self._agent.saved.refs} if self._agent.saved else set()
            needed = dict.fromkeys(self._begun.refs)
            self._held = [ref for ref in needed if id(ref) not in own_refs]
            self._store.blocks.hold(self._held)
        self.head, self.spans = await self._workers.run(lambda: self._name_spans(ids, same_tokens))
        return (*(self.head.spans if self.head is not None else ()), *self.spans)

    def _name_spans(
        self, ids: Sequence[int], same_tokens: int
    ) -> tuple[NamedHead | None, tuple[BlockSpan, ...]]:
        store, tenant, known = self._store, self._agent.manifest.tenant, self.spans
        if self.layout is None:
            return None, store.spans(tenant, ids, known, same_tokens)
        layout = self.layout.cut(len(ids))
        # Memory holds the rows of lost blocks, so this writer stores these blocks again.
        self._lost |= set(store.blocks.missing(layout.refs))
        layout = layout.with_lost_blocks(self._lost, self._cache.window_base)
        head = store.name_head(tenant, ids, layout)
        return head, store.spans(tenant, ids, known, same_tokens, head.lineage)

    def find_stored(self, span: BlockSpan) -> BlockRef | None:
        """Return the stored block that has this span's exact bytes, if any."""
        return self.find_all_stored([span])[0]

    def find_all_stored(self, spans: Sequence[BlockSpan]) -> list[BlockRef | None]:
        """Return the stored block of each span, or None, with one look-up in the store."""
        refs = [self._known_block(span) for span in spans]
        missing = self._store.blocks.missing(ref for ref in refs if ref is not None)
        return [None if ref in missing else ref for ref in refs] if missing else refs

    def _known_block(self, span: BlockSpan) -> BlockRef | None:
        ref = self._saved.get(span.block_hash)
        if ref is None and span.end <= self._cached:
            # Only these tokens have the block's bytes in the cache; later ones were recomputed.
            ref = self._restored.get(span.block_hash)
        return ref

    async def save(self, span: BlockSpan, ids: Sequence[int]) -> BlockRef:
        """Store one block of the cache, unless it is stored already."""
        ref = self.find_stored(span)
        if ref is not None:
            return ref
        cache = self._cache

        def gather() -> memoryview:
            cache.settle()
            return cache.gather(span.start, span.end, span.group)

        return await self._put(span, ids, await self.compute(gather))

    async def save_beginning(self, ids: Sequence[int], end: int) -> list[NamedBlock]:
        """Store the blocks of the first `end` tokens, many at a time; return their full layers'.

        The last block is shortened if the cache does not hold all of it yet. Windows that slid out
        of the cache were copied out, and so were recurrent states.
        """
        await self.save_passing(ids)
        count, tenant = self._cache.tokens_count, self._agent.manifest.tenant
        spans = [span for span in self.spans if span.start < end and span.end <= count]
        if (spans[-1].end if spans else 0) < end:
            cut = partial(self._store.span_ending, tenant, ids, self.spans, end)
            spans.append(await self._workers.run(cut))
        all_spans = spans
        if CacheGroup.WINDOW in self._store.spec.groups:
            salt = self._store.salt(tenant)
            all_spans = [*spans, *(span.in_group(salt, CacheGroup.WINDOW) for span in spans)]
        pairs = zip(all_spans, self.find_all_stored(all_spans), strict=True)
        unsaved = deque(span for span, ref in pairs if ref is None)
        while unsaved:
            await self._save_some(unsaved, ids)
        await self.save_passing(ids)
        named = zip(spans, self.find_all_stored(spans), strict=True)
        return [(span, ref) for span, ref in named if ref is not None]

    async def _save_some(self, unsaved: deque[BlockSpan], ids: Sequence[int]) -> None:
        """Store as many of the first blocks of `unsaved` as are copied out at once."""
        spec, cache, size_bytes = self._store.spec, self._cache, 0
        batch: list[BlockSpan] = []
        while unsaved and (not batch or size_bytes < HEAD_BYTES_MAX):
            batch.append(unsaved.popleft())
            size_bytes += spec.kv_bytes(batch[-1].end - batch[-1].start, batch[-1].group)

        def gather() -> list[tuple[BlockSpan, memoryview]]:
            cache.settle()
            held_from = {CacheGroup.FULL: 0, CacheGroup.WINDOW: cache.window_base}
            held_spans = [span for span in batch if span.start >= held_from[span.group]]
            return [(span, cache.gather(span.start, span.end, span.group)) for span in held_spans]

        for span, kv in await self.compute(gather):
            await self._put(span, ids, kv)

    async def save_passing(self, ids: Sequence[int]) -> None:
        """Save the parts that the cache drops: blocks that slid out of windows, and states."""
        if not self.spans and self.head is None:
            return
        salt, slid = self._store.salt(self._agent.manifest.tenant), self._cache.slid
        holes = self.head.spans if self.head is not None else ()
        spans = {span.start: span for span in (*holes, *self.spans)} if slid else {}
        for start in sorted(slid):
            span = spans.get(start)
            if span is not None and len(slid[start]) == self._window_bytes(span):
                await self._put(span.in_group(salt, CacheGroup.WINDOW), ids, slid[start])
                del slid[start]
        for end in sorted(self._cache.snapshots):
            if end <= self.spans[-1].end:
                await self._save_state(ids, end)

    def _window_bytes(self, span: BlockSpan) -> int:
        return self._store.spec.kv_bytes(span.end - span.start, CacheGroup.WINDOW)

    async def _put(self, span: BlockSpan, ids: Sequence[int], kv: memoryview) -> BlockRef:
        store = self._store
        await self._make_room(store.blocks.file_bytes(span.group, span.end - span.start))
        ref = await self._workers.run(lambda: store.save_block(span, ids, kv))
        before = self._saved.get(span.block_hash)
        if (
            before is not None
        ):  # a turn cancelled right after its prompt ends in a state that is saved
            store.blocks.abandon([before])
        self._saved[span.block_hash] = ref
        return ref

    async def _make_room(self, size_bytes: int) -> None:
        """Reserve bytes on the disk; drop the agent's branches before evicting other agents."""
        saved = self._agent.saved
        if saved is not None and saved.branches:
            if await self._room.add_free(size_bytes):
                return
            await self._drop_branches(saved)
        await self._room.add(size_bytes)

    async def _drop_branches(self, saved: Manifest) -> None:
        """Drop the superseded forms of the agent, whose turn lock the caller holds."""
        agent, smaller = self._agent, replace(saved, branches=None)
        try:
            await self._workers.run(lambda: self._store.publish(smaller, saved))
        except (FabricError, OSError) as error:
            _log.warning("cannot drop the branches of an agent: %s", error)
            return
        agent.saved, agent.manifest = smaller, replace(agent.manifest, branches=None)

    async def _save_state(self, ids: Sequence[int], end: int) -> None:
        cache, tenant, spans = self._cache, self._agent.manifest.tenant, self.spans
        span = await self._workers.run(lambda: self._store.state_span(tenant, ids, spans, end))
        kv = await self.compute(lambda: cache.gather_snapshot(end))
        await self._put(span, ids, kv)
        cache.snapshots.pop(end, None)
        self._states[end] = self._saved[span.block_hash]

    # --- the record --------------------------------------------------------------------------

    async def save_full(
        self, ids: Sequence[int], same_tokens: int
    ) -> tuple[PieceTable, EditedHead | None]:
        """Store all complete blocks of the cache; return their pieces and edited head.

        There are none while tokens before the last edit are still to be computed.
        """
        count = min(len(ids), self._cache.tokens_count)
        if self.layout is not None and count < self.layout.head_tokens:
            return PieceTable(), None
        await self.name(ids, same_tokens)
        spans = list(self.head.spans if self.head is not None else ())
        spans += [span for span in self.spans if span.is_full and span.end <= count]
        return self._pieces([await self.save(span, ids) for span in spans], ids)

    def _pieces(
        self, refs: Sequence[BlockRef], ids: Sequence[int]
    ) -> tuple[PieceTable, EditedHead | None]:
        """Return the pieces of a cache whose blocks, in the order of their names, are `refs`."""
        if self.head is None:
            return PieceTable().append(refs), None
        count = len(self.head.spans)
        pieces, edited = self.head.filled(refs[:count], U32s(ids))
        return pieces.append(refs[count:]), edited

    async def publish(
        self,
        manifest: Manifest,
        same_tokens: int,
        *,
        is_superseding: bool = False,
        completed: Callable[[Manifest], Manifest] = _keep_record,
    ) -> Manifest:
        """Store the blocks, then the record that refers to them; return it.

        Its tokens begin with `same_tokens` of those named before. With `is_superseding`, the record
        before it is kept as a branch. `completed` adds to the record once the blocks are stored.
        """
        ids = manifest.token_ids
        try:
            spans = await self.name(ids, same_tokens)
            pairs = zip(spans, self.find_all_stored(spans), strict=True)
            refs = [ref or await self.save(span, ids) for span, ref in pairs]
            windows = await self._publish_windows(spans, ids)
            states = await self._publish_states(ids, manifest.provenance.marks)
            pieces, edited = self._pieces(refs, ids)
            manifest = replace(
                manifest, pieces=pieces, windows=windows, states=states, edited=edited
            )
            manifest = completed(manifest)
            manifest = self._with_branches(manifest, is_superseding=is_superseding)
            await self._make_room(record_bytes(manifest))
        except BaseException:
            self.abandon()
            raise
        manifest = self._with_branches(manifest, is_superseding=is_superseding)
        previous = self._agent.saved
        # From here on, these blocks are accounted for by the record's references.
        needed = set(manifest.refs)
        self._store.blocks.abandon(set(self._saved.values()) - needed)
        self._hold_only(needed)
        try:
            await self._workers.run(lambda: self._store.publish(manifest, previous))
        finally:
            self._release()
        return manifest

    def _with_branches(self, manifest: Manifest, *, is_superseding: bool) -> Manifest:
        """Return the record with its branches, as far as their blocks are stored."""
        previous, missing = self._agent.saved, self._store.blocks.missing
        branches = branches_after(previous, manifest, missing, is_superseded=is_superseding)
        return replace(manifest, branches=branches)

    async def _publish_windows(
        self, spans: Sequence[BlockSpan], ids: Sequence[int]
    ) -> tuple[Placed, ...]:
        """Save and list the window layers' blocks that were kept."""
        if CacheGroup.WINDOW not in self._store.spec.groups:
            return ()
        await self.save_passing(ids)
        salt = self._store.salt(self._agent.manifest.tenant)
        spans = [whole.in_group(salt, CacheGroup.WINDOW) for whole in spans]
        places = [Placed(ref, end) for end, ref in self.head.windows] if self.head else []
        for span, known in zip(spans, self.find_all_stored(spans), strict=True):
            ref = known
            if ref is None and span.start >= self._cache.window_base:
                ref = await self.save(span, ids)
            if ref is not None:
                places.append(Placed(ref, span.end))
        return tuple(sorted(places, key=lambda place: place.end))

    async def _publish_states(self, ids: Sequence[int], marks: PromptMarks) -> tuple[Placed, ...]:
        """Save the current state; list it with the earlier ones that are still stored."""
        if CacheGroup.STATE not in self._store.spec.groups:
            return ()
        await self.compute(self._cache.take_snapshot)
        await self.save_passing(ids)
        has = self._store.blocks.has
        states = {end: ref for end, ref in self._kept_states.items() if has(ref)}
        states |= self._states
        return kept_states([Placed(ref, end) for end, ref in sorted(states.items())], marks)

"""Save a turn: the prompt's blocks while the answer is decoded, the rest at its end.

Only blocks that are not stored yet are copied out of the cache, one at a time between two
steps, so that saving a long prompt never stalls other agents' decoding. What a cache cannot
hold on to (blocks that slide out of a window, recurrent states) is taken as soon as it is
there, and the prompt waits if too much of it piles up.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.block import BlockRef
from fabric.block_chain import BlockSpan
from fabric.cache_spec import CacheGroup
from fabric.errors import FabricError
from fabric.generation import GenerateRequest
from fabric.limits import BLOCK_TOKENS, UNSAVED_BYTES_MAX
from fabric.manifest import Manifest, OwnerState, Piece, Placed
from fabric.state_points import kept_states
from node.agent import Agent
from node.prefix import Prepared
from node.sequence import Ended

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)
IDLE_SHARE = 19.0  # saving ahead takes a twentieth of the time, so that decoding is not slowed
FIRST_WAIT_S = 0.25  # a short answer is over before that
DRAIN_S = 0.05  # how often a prompt under way is asked for what it cannot hold on to


class Saver:
    """Makes one turn durable."""

    def __init__(
        self, node: "Node", agent: Agent, prepared: Prepared, request: GenerateRequest
    ) -> None:
        self._node = node
        self._agent = agent
        self._prepared = prepared
        self._request = request
        self._cache = prepared.cache
        self._restored = {ref.block_hash: ref for ref in prepared.stock.refs()}
        self._saved: dict[bytes, BlockRef] = {}
        self._states: dict[int, BlockRef] = {}
        self._early: asyncio.Task[None] | None = None
        self._is_decoding = False
        self._has_failed = False
        self._over = asyncio.Event()

    # --- ahead of the turn's end -------------------------------------------------------------

    def begin(self) -> None:
        """Start saving what is complete; it does not change any more."""
        if self._node.reuses:
            self._early = asyncio.create_task(self._save_ahead())

    def note_decoding(self) -> None:
        """Note that the whole prompt is in the cache."""
        self._is_decoding = True

    def is_behind(self) -> bool:
        """Say whether too much waits to be saved for the prompt to go on."""
        if self._has_failed or self._early is None:
            return False
        spec, cache = self._node.spec, self._cache
        waiting = sum(view.nbytes for view in list(cache.slid.values()))
        waiting += len(cache.snapshots) * spec.kv_bytes(0, CacheGroup.STATE)
        return waiting > max(UNSAVED_BYTES_MAX, 2 * spec.kv_bytes(0, CacheGroup.STATE))

    async def _save_ahead(self) -> None:
        ids = self._prepared.plan.ids
        try:
            spans = await self._spans(ids[: len(ids) - 1])
            full = deque(span for span in spans if span.is_full and not self._stored(span))
            passing = len(self._node.spec.groups) > 1
            wait_s = DRAIN_S if passing else FIRST_WAIT_S
            while (full or passing) and not await self._is_over_within(wait_s):
                await self._save_passing(spans, ids)
                wait_s = DRAIN_S if passing else FIRST_WAIT_S
                if full and self._is_decoding:
                    began_s = self._node.clock.monotonic_s()
                    await self._save(full.popleft(), ids)
                    wait_s = IDLE_SHARE * (self._node.clock.monotonic_s() - began_s)
        except (FabricError, OSError) as error:
            _log.warning("saving ahead stopped: %s", error)
            self._has_failed = True
        finally:
            self._node.engine.wake()

    async def _save_passing(self, spans: Sequence[BlockSpan], ids: Sequence[int]) -> None:
        """Save what the cache has let go of, or will."""
        salt = self._node.store.salt(self._agent.manifest.tenant)
        for start in sorted(self._cache.slid):
            index = start // BLOCK_TOKENS
            if index < len(spans) and spans[index].is_full:
                span = spans[index].in_group(salt, CacheGroup.WINDOW)
                await self._put(span, ids, self._cache.slid[start])
                del self._cache.slid[start]
        for end in sorted(self._cache.snapshots):
            if end <= spans[-1].end:
                await self._save_state(spans, ids, end)
        self._node.engine.wake()

    async def _is_over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    async def _end_early(self) -> None:
        self._over.set()
        if self._early is not None:
            await self._early

    # --- one block ---------------------------------------------------------------------------

    async def _spans(self, ids: Sequence[int]) -> tuple[BlockSpan, ...]:
        tenant = self._agent.manifest.tenant
        return await self._node.in_worker(lambda: self._node.store.spans(tenant, ids))

    def _stored(self, span: BlockSpan) -> BlockRef | None:
        """Return the stored block with this span's very bytes, if there is one."""
        known = self._saved.get(span.block_hash)
        if known is None and span.end <= self._prepared.cached:
            # Only then are the cache's bytes those of the block, and not a recomputation.
            known = self._restored.get(span.block_hash)
        return known if known is not None and self._node.store.blocks.has(known) else None

    async def _save(self, span: BlockSpan, ids: Sequence[int]) -> BlockRef:
        known = self._stored(span)
        if known is not None:
            return known
        cache = self._cache

        def gather() -> memoryview:
            cache.settle()
            return cache.gather(span.start, span.end, span.group)

        return await self._put(span, ids, await self._node.on_engine(gather))

    async def _put(self, span: BlockSpan, ids: Sequence[int], kv: memoryview) -> BlockRef:
        store = self._node.store
        ref = await self._node.in_worker(lambda: store.save_block(span, ids, kv))
        self._saved[span.block_hash] = ref
        return ref

    async def _save_state(self, spans: Sequence[BlockSpan], ids: Sequence[int], end: int) -> None:
        node, cache, tenant = self._node, self._cache, self._agent.manifest.tenant
        span = await node.in_worker(lambda: node.store.state_span(tenant, ids, spans, end))
        kv = await node.on_engine(lambda: cache.gather_snapshot(end))
        await self._put(span, ids, kv)
        cache.snapshots.pop(end, None)
        self._states[end] = self._saved[span.block_hash]

    # --- the end of the turn -----------------------------------------------------------------

    async def abandon(self) -> None:
        """Give up: nothing will refer to what was saved ahead."""
        await self._end_early()
        self._node.store.blocks.abandon(self._saved.values())

    async def commit(self, ended: Ended) -> bool:
        """Publish the turn's record and keep its cache hot; say whether it is durable."""
        await self._end_early()
        cache, agent, node = self._cache, self._agent, self._node
        manifest = self._record(ended)
        if cache.tokens_count != manifest.tokens_count:
            await self.abandon()
            message = f"cache holds {cache.tokens_count} tokens, record {manifest.tokens_count}"
            raise FabricError(message, code="cache_out_of_step")
        if not manifest.token_ids or not node.reuses:
            await self.abandon()
            return False
        try:
            manifest = await self._publish(manifest)
        except (FabricError, OSError) as error:
            node.degraded = f"cannot save agents: {error}"
            _log.error("a turn is in memory only: %s", error)
            agent.is_durable = False
        else:
            node.degraded = None
            agent.saved, agent.is_durable = manifest, True
        await node.on_engine(cache.rest)
        agent.manifest, agent.cache = manifest, cache
        node.table.put(agent)
        return agent.is_durable

    async def _publish(self, manifest: Manifest) -> Manifest:
        """Store the blocks, then the record that refers to them."""
        node, previous, ids = self._node, self._agent.saved, manifest.token_ids
        try:
            spans = await self._spans(ids)
            refs = [await self._save(span, ids) for span in spans]
            windows = await self._publish_windows(spans, ids)
            states = await self._publish_states(spans, ids)
        except BaseException:
            await self.abandon()
            raise
        manifest = replace(
            manifest,
            pieces=tuple(Piece(ref, 0, ref.tokens_count) for ref in refs),
            windows=windows,
            states=states,
        )
        # From here the record's references, or their release, account for these blocks.
        node.store.blocks.abandon(set(self._saved.values()) - set(manifest.refs))
        await node.in_worker(lambda: node.store.publish(manifest, previous))
        return manifest

    async def _publish_windows(
        self, spans: Sequence[BlockSpan], ids: Sequence[int]
    ) -> tuple[Placed, ...]:
        """List the window layers' blocks; those that nobody could keep are left out."""
        if CacheGroup.WINDOW not in self._node.spec.groups:
            return ()
        await self._save_passing(spans, ids)
        salt = self._node.store.salt(self._agent.manifest.tenant)
        places = []
        for whole in spans:
            span = whole.in_group(salt, CacheGroup.WINDOW)
            ref = self._stored(span)
            if ref is None and span.start >= self._cache.window_base:
                ref = await self._save(span, ids)
            if ref is not None:
                places.append(Placed(ref, span.end))
        return tuple(places)

    async def _publish_states(
        self, spans: Sequence[BlockSpan], ids: Sequence[int]
    ) -> tuple[Placed, ...]:
        """Save the state of now, and list it with the earlier ones that still hold."""
        if CacheGroup.STATE not in self._node.spec.groups:
            return ()
        await self._node.on_engine(self._cache.take_snapshot)
        await self._save_passing(spans, ids)
        has = self._node.store.blocks.has
        kept = {end: ref for end, ref in self._prepared.states.items() if has(ref)}
        kept |= self._states
        return kept_states([Placed(ref, end) for end, ref in sorted(kept.items())])

    def _record(self, ended: Ended) -> Manifest:
        """Describe what the cache holds: a cancelled prompt counts as far as it got."""
        plan, old = self._prepared.plan, self._agent.manifest
        count = min(len(plan.ids), self._cache.tokens_count)
        text, ends = plan.text, plan.ends[:count]
        if count < len(plan.ids):
            text = text[: ends[-1] if ends else 0]
        ends = ends + [len(text) + end for end in ended.answer_ends]
        return replace(
            old,
            revision=old.revision + 1,
            state=OwnerState.OWNED,
            text=(text + ended.answer_text.encode("utf-8", "replace")).decode("utf-8", "replace"),
            token_ids=tuple(plan.ids[:count] + ended.answer_ids),
            token_ends=tuple(ends),
            prompt_tokens_count=count,
            pieces=(),
            windows=(),
            states=(),
            sketch=self._request.sketch or old.sketch,
            used_s=self._node.clock.wall_s(),
            migration=None,
            sealed_to=None,
        )

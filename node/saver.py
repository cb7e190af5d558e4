"""Save a turn: the prompt's blocks while the answer is decoded, the rest at its end.

Only blocks that are not stored yet are copied out of the cache, one at a time between two
steps, so that saving a long prompt never stalls other agents' decoding.
"""

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.block import BlockRef
from fabric.block_chain import BlockSpan
from fabric.errors import FabricError
from fabric.generation import GenerateRequest
from fabric.manifest import Manifest, OwnerState
from node.agent import Agent
from node.agent_store import with_blocks
from node.prefix import Prepared
from node.sequence import Ended

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)
IDLE_SHARE = 19.0  # saving ahead takes a twentieth of the time, so that decoding is not slowed
FIRST_WAIT_S = 0.25  # a short answer is over before that


class Saver:
    """Makes one turn durable."""

    def __init__(
        self, node: "Node", agent: Agent, prepared: Prepared, request: GenerateRequest
    ) -> None:
        self._node = node
        self._agent = agent
        self._prepared = prepared
        self._request = request
        self._restored = {piece.block.block_hash: piece.block for piece in prepared.pieces}
        self._saved: dict[bytes, BlockRef] = {}
        self._early: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    def begin(self) -> None:
        """Start saving the prompt's full blocks; they do not change any more."""
        self._early = asyncio.create_task(self._save_prompt())

    async def _save_prompt(self) -> None:
        ids, clock = self._prepared.plan.ids, self._node.clock
        wait_s = FIRST_WAIT_S
        try:
            for span in await self._spans(ids[: len(ids) - 1]):
                if self._stored(span) or not span.is_full:
                    continue
                if await self._is_over_within(wait_s):
                    return
                began_s = clock.monotonic_s()
                await self._save(span, ids)
                wait_s = IDLE_SHARE * (clock.monotonic_s() - began_s)
        except FabricError as error:
            _log.warning("saving ahead stopped: %s", error.message)

    async def _is_over_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), seconds)
        return self._over.is_set()

    async def _spans(self, ids: list[int]) -> tuple[BlockSpan, ...]:
        tenant = self._agent.manifest.tenant
        return await self._node.in_worker(lambda: self._node.store.spans(tenant, ids))

    def _stored(self, span: BlockSpan) -> BlockRef | None:
        """Return the stored block with this span's very bytes, if there is one."""
        known = self._saved.get(span.block_hash)
        if known is None and span.end <= self._prepared.cached:
            # Only then are the cache's bytes those of the block, and not a recomputation.
            known = self._restored.get(span.block_hash)
        return known if known is not None and self._node.store.blocks.has(known) else None

    async def _save(self, span: BlockSpan, ids: list[int]) -> BlockRef:
        known = self._stored(span)
        if known is not None:
            return known
        node, cache = self._node, self._prepared.cache

        def gather() -> memoryview:
            cache.settle()
            return cache.gather(span.start, span.end)

        kv = await node.on_engine(gather)
        ref = await node.in_worker(lambda: node.store.save_block(span, ids, kv))
        self._saved[span.block_hash] = ref
        return ref

    async def _end_early(self) -> None:
        self._over.set()
        if self._early is not None:
            await self._early

    async def abandon(self) -> None:
        """Give up: nothing will refer to what was saved ahead."""
        await self._end_early()
        self._node.store.blocks.abandon(self._saved.values())

    async def commit(self, ended: Ended) -> bool:
        """Publish the turn's record and keep its cache hot; say whether it is durable."""
        await self._end_early()
        cache, agent, node = self._prepared.cache, self._agent, self._node
        manifest = self._record(ended)
        if cache.tokens_count != manifest.tokens_count:
            await self.abandon()
            message = f"cache holds {cache.tokens_count} tokens, record {manifest.tokens_count}"
            raise FabricError(message, code="cache_out_of_step")
        if not manifest.token_ids:
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
        agent.manifest, agent.cache = manifest, cache
        node.table.put(agent)
        return agent.is_durable

    async def _publish(self, manifest: Manifest) -> Manifest:
        """Store the blocks, then the record that refers to them."""
        node, previous, ids = self._node, self._agent.saved, list(manifest.token_ids)
        try:
            refs = [await self._save(span, ids) for span in await self._spans(ids)]
        except BaseException:
            await self.abandon()
            raise
        # From here the record's references, or their release, account for these blocks.
        node.store.blocks.abandon(set(self._saved.values()) - set(refs))
        manifest = with_blocks(manifest, refs)
        await node.in_worker(lambda: node.store.publish(manifest, previous))
        return manifest

    def _record(self, ended: Ended) -> Manifest:
        """Describe what the cache holds: a cancelled prompt counts as far as it got."""
        plan, old = self._prepared.plan, self._agent.manifest
        count = min(len(plan.ids), self._prepared.cache.tokens_count)
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
            sketch=self._request.sketch or old.sketch,
            used_s=self._node.clock.wall_s(),
            migration=None,
            sealed_to=None,
        )

"""Heads of prompts that this node lends to turns on other nodes, as blocks.

    stored      an agent's saved record, up to its first edit, or a prefix that was fetched
    running     a turn: what it has published, and publishes because another node requests it

Private agents and edited memory are never lent, and no tenant gets blocks of another: their names
hold the tenant's salt, and each lender must belong to the tenant of the request.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from fabric.control.agent_at import OfferRequest
from fabric.control.head_calls import HeadOffer, LentHead, OfferHead
from fabric.ids import SELF_TEST_TENANT, AgentKey, BlockHash, TenantId
from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS
from fabric.ports import Clock
from fabric.record.manifest import Manifest
from fabric.turn.alignment import common_prefix
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.engine.engine_thread import EngineThread
from node.engine.sequence import Head
from node.limits import HEAD_LENDERS_MAX, HEAD_OFFER_S
from node.migration.prefix_source import (
    SharedPrefixSource,
    cut_record,
    prefix_record,
    whole_blocks,
)
from node.runtime.health import Health
from node.runtime.live_turns import LiveTurns
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.tombstones import TombstoneStore
from node.tiers.span_leases import SpanLeases
from node.transfer.server import TransferServer
from node.turn.heads import TurnHeads

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadLenders:
    """Offers of heads to other nodes' turns; used on the event loop."""

    clock: Clock
    table: AgentTable
    store: AgentStore
    erased: TombstoneStore
    workers: Workers
    engine: EngineThread
    transfers: TransferServer
    prefixes: SharedPrefixSource
    leases: SpanLeases
    heads: TurnHeads
    live: LiveTurns
    health: Health

    async def offer(self, call: OfferHead) -> HeadOffer:
        """Offer the stored part of a head, once it exceeds what the caller has.

        Running turns that compute more of the head publish it meanwhile.
        """
        self.transfers.offers.withdraw(call.migration)  # the earlier blocks have arrived
        if not self.health.reuses or call.tenant == SELF_TEST_TENANT:
            return HeadOffer(None)
        wanted = Head(
            ids=[],
            names=call.names,
            stored_tokens=call.had_tokens // BLOCK_TOKENS * BLOCK_TOKENS,
            has_states=CacheGroup.STATE in self.store.spec.groups,
            shares_parts=False,
        )
        self.engine.heads.follow(wanted, is_urgent=call.is_urgent)
        self.engine.wake()
        try:
            return await self._offer_more(call, wanted)
        finally:
            self.engine.heads.unfollow(wanted)

    async def _offer_more(self, call: OfferHead, wanted: Head) -> HeadOffer:
        until_s = self.clock.monotonic_s() + call.wait_s
        while True:
            news = self.heads.news  # read before the lookup, so that no change is missed
            lent = await self._longest(call, wanted)
            left_s = until_s - self.clock.monotonic_s()
            if lent is not None or left_s <= 0:
                is_preparing = any(t.tenant == call.tenant and t.is_preparing for t in self.live)
                return HeadOffer(lent, self._coming_tokens(call.tenant, wanted), is_preparing)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), left_s)

    def _coming_tokens(self, tenant: TenantId, wanted: Head) -> int:
        """Return how many tokens of a head running turns hold or compute, in whole blocks."""
        longest = 0
        for lead, _ in self.heads.leads(tenant, wanted.names[0]):
            most = lead.computed_tokens
            common = wanted.common_tokens(lead)
            longest = max(longest, common if most is None else min(common, most))
        return longest // BLOCK_TOKENS * BLOCK_TOKENS

    # --- what is stored ----------------------------------------------------------------------

    async def _longest(self, call: OfferHead, wanted: Head) -> LentHead | None:
        """Offer the longest stored part of a head, if it exceeds what the caller has."""
        had = wanted.stored_tokens // BLOCK_TOKENS
        best, count = None, had
        for record in self._records(call.tenant, call.names[0]):
            common = common_prefix(tuple(whole_blocks(record)), call.names)
            if common > count:
                best, count = record, common
        longest = None
        lead = self._best_lead(call.tenant, wanted, count)
        if lead is not None:
            longest = await self._published_record(*lead)
        if best is not None and (longest is None or longest.tokens_count < count * BLOCK_TOKENS):
            longest = await self.workers.run(lambda: cut_record(self.store, best, count)) or longest
        if longest is None or longest.tokens_count <= call.had_tokens:
            return None
        if not self._may_lend(longest.key, longest.epoch):
            return None
        return self._lent(call, longest)

    def _records(self, tenant: TenantId, first: BlockHash) -> Iterator[Manifest]:
        """Yield the records of this tenant that begin with a block, and may be lent."""
        keys = self.table.agents_beginning_with(tenant, first)
        agents = (agent for key in keys if (agent := self.table.get(key)) is not None)
        sharing = (agent for agent in agents if self.prefixes.may_share(agent))
        for agent in islice(sharing, HEAD_LENDERS_MAX):
            yield self.prefixes.shared_record(agent)
        leased = (record for record in self.leases.records if record.tenant == tenant)
        yield from islice(leased, HEAD_LENDERS_MAX)

    def _best_lead(
        self, tenant: TenantId, wanted: Head, count: int
    ) -> tuple[Agent, Head, int] | None:
        """Return the running turn that has published the most blocks, if more than `count`."""
        best = None
        for lead, agent in self.heads.leads(tenant, wanted.names[0]):
            ready = min(wanted.common_tokens(lead), lead.published_tokens) // BLOCK_TOKENS
            if ready > count:
                best, count = (agent, lead, ready), ready
        return best

    async def _published_record(self, agent: Agent, lead: Head, count: int) -> Manifest | None:
        """Return the record of the first blocks that a running turn has published."""
        tenant, ids = agent.key[0], lead.ids[: count * BLOCK_TOKENS]
        shared = await self.workers.run(lambda: self.store.shared_prefix(tenant, ids))
        if agent.is_private or not lead.leads:  # changed during the lookup
            return None
        may_use = self.table.count_usable(agent, shared.blocks, self.leases.refs | self.heads.lent)
        layout = shared.cut(may_use * BLOCK_TOKENS)
        lender = replace(agent.manifest, owner=self.health.name)
        return await self.workers.run(lambda: prefix_record(self.store, lender, ids, layout))

    def _may_lend(self, key: AgentKey, epoch: int) -> bool:
        """Return whether a lender may still lend; it may have been erased or made private."""
        if self.erased.is_erased(key, epoch):
            return False
        agent = self.table.get(key)
        if agent is not None and agent.is_private:
            return False
        is_lease = any(record.key == key for record in self.leases.records)
        is_lead = agent is not None and agent.turn is not None
        return is_lease or is_lead or self.prefixes.is_still_shared(key, epoch)

    def _lent(self, call: OfferHead, record: Manifest) -> LentHead:
        request = OfferRequest(*record.key, record.epoch, call.migration, call.target)
        refs = list(dict.fromkeys(record.refs))
        ticket = self.transfers.offers.add(request, refs, HEAD_OFFER_S)
        text = "%s: lends the first %d tokens of a prompt, of which it has %d, to %s"
        _log.info(text, call.migration, record.tokens_count, call.had_tokens, call.target)
        return LentHead(
            agent=record.agent,
            epoch=record.epoch,
            tokens=record.tokens_count,
            blocks=tuple(record.pieces.blocks),
            windows=record.windows,
            states=record.states,
            ticket=ticket,
            addresses=self.transfers.addresses(),
        )

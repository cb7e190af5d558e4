"""Offer another node what several agents here begin with; nothing of the agents themselves changes.

Only agents that this node owns count, and none whose memory is for itself alone: what but such
agents refer to is neither counted nor lent.
"""

from dataclasses import dataclass, replace
from heapq import nlargest

from fabric.control.agent_at import OfferRequest
from fabric.control.span_calls import OfferSpans, SpanOffer, SpanOffers
from fabric.ids import SELF_TEST_TENANT, AgentKey
from fabric.record.manifest import Manifest, OwnerState
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import SPAN_LENDERS_MAX
from node.migration.offers import Offers
from node.migration.popular_spans import popular_spans
from node.runtime.health import Health
from node.runtime.identity import NodeIdentity
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.tombstones import TombstoneStore


@dataclass(frozen=True, slots=True)
class SpanSource:
    """The lending side of one node."""

    identity: NodeIdentity
    table: AgentTable
    store: AgentStore
    erased: TombstoneStore
    workers: Workers
    offers: Offers
    health: Health

    async def offer(self, call: OfferSpans) -> SpanOffers:
        """Offer what is most shared here, up to a number of bytes."""
        bytes_max = self.identity.settings.popular_bytes
        if not bytes_max or not self.health.reuses:
            return SpanOffers(())
        records = self._lent()
        found = await self.workers.run(lambda: popular_spans(self.store, records, bytes_max))
        made = []
        for span in found:
            record = span.record
            if not self._lends(record.key, record.epoch):  # it changed meanwhile
                continue
            asked = OfferRequest(*record.key, record.epoch, call.migration, call.target)
            offer = self.offers.make(asked, record)
            made.append(SpanOffer(*record.key, offer, span.sharers))
        return SpanOffers(tuple(made))

    def _lent(self) -> list[Manifest]:
        """List the records of whoever lends, those used last first."""
        agents = (agent for agent in self.table if self._may_lend(agent))
        last = nlargest(SPAN_LENDERS_MAX, agents, key=lambda agent: agent.manifest.used_s)
        # The record on disk may be of an earlier epoch, until a turn has ended in this one.
        return [
            replace(agent.saved, epoch=agent.manifest.epoch, owner=self.identity.name)
            for agent in last
            if agent.saved is not None
        ]

    def _may_lend(self, agent: Agent) -> bool:
        word, saved = agent.word, agent.saved
        return (
            saved is not None
            and word.state is OwnerState.OWNED
            and word.tenant != SELF_TEST_TENANT
            and not (agent.manifest.is_private or saved.is_private)
            and word.epoch > self.erased.floor(*agent.key)
        )

    def _lends(self, key: AgentKey, epoch: int) -> bool:
        agent = self.table.get(key)
        return agent is not None and self._may_lend(agent) and agent.manifest.epoch == epoch

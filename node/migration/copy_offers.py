"""Offer an agent's last saved record to be copied; nothing of the agent itself changes."""

from dataclasses import dataclass, replace

from fabric.control.node_calls import Offer
from fabric.control.replica_calls import OfferCopy
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import NodeName
from node.agents.owned import OwnedAgents
from node.migration.offers import Offers
from node.tiers.record_mending import RecordMending


@dataclass(frozen=True, slots=True)
class CopySource:
    """The owner's side of replicas and forks."""

    name: NodeName
    owned: OwnedAgents
    mending: RecordMending
    offers: Offers

    async def offer(self, call: OfferCopy) -> Offer:
        """Offer the agent's last saved record, whatever runs meanwhile."""
        agent = self.owned.require(call.key, call.epoch)
        await self.mending.whole(agent, verify=call.verify)
        self.owned.recheck(agent, call.epoch)
        record = agent.saved
        if record is None or not record.token_ids:
            if agent.is_busy:
                message = "the agent's first turn has not ended yet"
                raise RetryLaterError(message, code="nothing_saved")
            message = "nothing of the agent is on disk"
            raise ConflictError(message, code="nothing_saved")
        # The record on disk may be of an earlier epoch, until a turn has ended in this one.
        return self.offers.make(call, replace(record, epoch=call.epoch, owner=self.name))

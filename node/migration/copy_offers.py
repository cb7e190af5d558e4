"""Offer an agent's last saved record to be copied; nothing of the agent itself changes."""

from dataclasses import dataclass, replace

from fabric.control.copy_calls import OfferCopy
from fabric.control.node_calls import Offer
from fabric.errors import ConflictError, RetryLaterError, StaleEpochError
from fabric.ids import NodeName
from fabric.record.manifest import OwnerState
from node.agents.agent_table import AgentTable
from node.migration.offers import Offers
from node.tiers.record_mending import RecordMending


@dataclass(frozen=True, slots=True)
class CopySource:
    """The owner's side of replicas and forks."""

    name: NodeName
    table: AgentTable
    mending: RecordMending
    offers: Offers

    async def offer(self, call: OfferCopy) -> Offer:
        """Offer the agent's last saved record, whatever runs meanwhile."""
        agent = self.table.require((call.tenant, call.agent))
        if agent.manifest.epoch != call.epoch:
            message = f"the agent is at epoch {agent.manifest.epoch}, not {call.epoch}"
            raise StaleEpochError(message)
        if agent.manifest.state is OwnerState.SEALED:
            message = "the agent is being moved to another node"
            raise RetryLaterError(message, code="agent_moving")
        if agent.manifest.state is not OwnerState.OWNED:
            message = f"the agent is {agent.manifest.state} here"
            raise ConflictError(message, code="not_owner")
        await self.mending.whole(agent, verify=call.verify)
        record = agent.saved
        if record is None or not record.token_ids:
            if agent.is_busy:
                message = "the agent's first turn has not ended yet"
                raise RetryLaterError(message, code="nothing_saved")
            message = "nothing of the agent is on disk"
            raise ConflictError(message, code="nothing_saved")
        # The record on disk may be of an earlier epoch, until a turn has ended in this one.
        return self.offers.make(call, replace(record, epoch=call.epoch, owner=self.name))

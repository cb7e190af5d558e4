"""Offers of records, whose blocks one other node may fetch for a while."""

import logging
from dataclasses import dataclass, replace
from typing import Final

from fabric.control.agent_at import OfferRequest
from fabric.control.node_calls import Offer
from fabric.control.replica_calls import OfferCopy
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import MigrationId, NodeName
from fabric.record.manifest import Manifest, encode_manifest
from node.agents.owned import OwnedAgents
from node.tiers.agent_records import RecordMending
from node.transfer.server import TransferServer

OFFER_VALID_S: Final = 600.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecordOffers:
    """Offers of records through the data plane's server."""

    transfers: TransferServer

    def add(self, call: OfferRequest, record: Manifest) -> Offer:
        """Offer all blocks of a record to the call's target; return the offer with its ticket."""
        record = replace(record, branches=None)  # what is superseded does not travel
        refs = list(dict.fromkeys(record.refs))
        ticket = self.transfers.offers.add(call, refs, OFFER_VALID_S)
        text = "%s: offers %d blocks of an agent to %s"
        _log.info(text, call.migration, len(refs), call.target)
        return Offer(encode_manifest(record), ticket, self.transfers.addresses())

    def withdraw(self, migration: MigrationId) -> None:
        """Withdraw all offers of a migration."""
        self.transfers.offers.withdraw(migration)


@dataclass(frozen=True, slots=True)
class CopySource:
    """Owner's side of replicas and forks; the agent itself does not change."""

    name: NodeName
    owned: OwnedAgents
    mending: RecordMending
    offers: RecordOffers

    async def offer(self, call: OfferCopy) -> Offer:
        """Offer the agent's last saved record, even while a turn runs."""
        agent = self.owned.require(call.key, call.epoch)
        await self.mending.repair(agent, verify=call.verify)
        self.owned.recheck(agent, call.epoch)
        record = agent.saved
        if record is None or not record.token_ids:
            if agent.is_busy:
                message = "the agent's first turn has not ended yet"
                raise RetryLaterError(message, code="nothing_saved")
            message = "nothing of the agent is on disk"
            raise ConflictError(message, code="nothing_saved")
        # The record on disk may be of an earlier epoch, until a turn has ended in this one.
        return self.offers.add(call, replace(record, epoch=call.epoch, owner=self.name))

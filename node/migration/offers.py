"""What a node lets one other node fetch: the blocks of one record, for a while."""

from dataclasses import dataclass
from typing import Final

from fabric.control.agent_at import OfferRequest
from fabric.control.node_calls import Offer
from fabric.ids import MigrationId
from fabric.record.manifest import Manifest, encode_manifest
from node.transfer.server import TransferServer

OFFER_VALID_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Offers:
    """Made to the data plane's server."""

    transfers: TransferServer

    def make(self, call: OfferRequest, record: Manifest) -> Offer:
        """Offer all blocks of a record to the call's target."""
        refs = list(dict.fromkeys(record.refs))
        ticket = self.transfers.offers.add(call, refs, OFFER_VALID_S)
        return Offer(encode_manifest(record), ticket, self.transfers.addresses())

    def withdraw(self, migration: MigrationId) -> None:
        """End all offers of a migration."""
        self.transfers.offers.withdraw(migration)

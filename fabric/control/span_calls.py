"""Control messages for prefixes that several agents share, copied to a node with few agents.

offer_spans → take_span, once for each → abort_migration
"""

from dataclasses import dataclass

from fabric.control.agent_at import AgentName
from fabric.control.node_calls import Offer
from fabric.ids import MigrationId, NodeName


@dataclass(frozen=True, slots=True)
class OfferSpans:
    """Request to a node to offer `target` the prefixes that several of its agents share."""

    migration: MigrationId
    target: NodeName


@dataclass(frozen=True, slots=True)
class SpanOffer(AgentName):
    """Prefix of one agent's record that `sharers` agents of its tenant share."""

    offer: Offer
    sharers: int


@dataclass(frozen=True, slots=True)
class SpanOffers:
    """Offered prefixes, the most shared first."""

    spans: tuple[SpanOffer, ...]


@dataclass(frozen=True, slots=True)
class TakeSpan:
    """Request to the target to fetch one offered prefix and keep it for a while."""

    migration: MigrationId
    source: NodeName
    offer: Offer


@dataclass(frozen=True, slots=True)
class ReturnSpans(AgentName):
    """Request to drop prefixes that came from this agent, and to stop fetching them."""

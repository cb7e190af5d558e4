"""Offers of this node: signed tickets, and the blocks that each one allows a peer to fetch.

A signature proves that a node of the cluster issued a ticket; only this book proves that it was
this node, for these blocks, and that the offer is still valid. It is in memory: after a restart
every old ticket is refused, and the migration offers again.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final

from fabric.control.agent_at import OfferRequest
from fabric.errors import OverloadedError, RejectedError, TooLargeError, UnauthorizedError
from fabric.hosting.turn_context import current_turn
from fabric.ids import AgentKey, MigrationId, NodeName, TurnId
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import TICKET_BLOCKS_MAX
from fabric.net.ticket import Ticket, blocks_digest, issue_ticket, open_ticket
from fabric.ports import Clock
from node.limits import OFFER_LIFE_S_MAX, OFFERS_MAX

_NONCE_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class _Offer:
    ticket: Ticket
    raw: bytes
    refs: Mapping[str, BlockRef]
    turn: TurnId | None  # turn that requested it
    valid_for_s: float
    expires_at_s: float
    ends_at_s: float  # at the latest, even if it is renewed


@dataclass(frozen=True, slots=True)
class OfferedBlocks:
    """Blocks by name that a peer may fetch, and the turn for which they were offered."""

    refs: Mapping[str, BlockRef]
    turn: TurnId | None


class OfferBook:
    """Offers by ticket nonce; safe to use from many threads."""

    def __init__(self, name: NodeName, cluster_key: bytes, clock: Clock) -> None:
        self._name = name
        self._cluster_key = cluster_key
        self._clock = clock
        self._lock = Lock()
        self._offers: dict[bytes, _Offer] = {}

    def add(
        self,
        request: OfferRequest,
        refs: Sequence[BlockRef],
        valid_for_s: float,
    ) -> bytes:
        """Allow the target to fetch `refs` for `valid_for_s` seconds; return the signed ticket.

        Every fetch renews it, so that a long copy may take longer: 50 GB take seven minutes over
        gigabit Ethernet and more over Wi-Fi. OFFER_LIFE_S_MAX ends it in any case.

        A repeated offer renews the first ticket. A later offer of a migration (its final
        record) is valid in addition to an earlier one until both are withdrawn.
        """
        if len(refs) > TICKET_BLOCKS_MAX:
            message = f"an offer of {len(refs)} blocks is over the limit of {TICKET_BLOCKS_MAX}"
            raise TooLargeError(message)
        if valid_for_s <= 0:
            message = "an offer must be valid for some time"
            raise RejectedError(message, code="invalid_offer")
        digest = blocks_digest([ref.name for ref in refs])
        nonce = secrets.token_bytes(_NONCE_BYTES)
        ticket = Ticket(
            request.migration,
            *request.key,
            self._name,
            request.target,
            request.epoch,
            digest,
            nonce,
        )
        now_s = self._clock.monotonic_s()
        offer = _Offer(
            ticket,
            issue_ticket(self._cluster_key, ticket),
            {ref.name: ref for ref in refs},
            current_turn(),
            valid_for_s,
            now_s + valid_for_s,
            now_s + max(valid_for_s, OFFER_LIFE_S_MAX),
        )
        with self._lock:
            return self._keep(offer)

    def withdraw(self, migration: MigrationId) -> None:
        """Refuse every ticket of `migration`; requests being answered are completed."""
        with self._lock:
            offers = {n: o for n, o in self._offers.items() if o.ticket.migration != migration}
            self._offers = offers

    def withdraw_agent(self, key: AgentKey) -> None:
        """Refuse every ticket for blocks of an erased agent."""
        with self._lock:
            self._offers = {n: o for n, o in self._offers.items() if o.ticket.key != key}

    def agents(self) -> frozenset[AgentKey]:
        """Return the agents whose blocks some node may fetch now."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            live = [offer.ticket for offer in self._offers.values() if offer.expires_at_s > now_s]
        return frozenset(ticket.key for ticket in live)

    def check(self, raw_ticket: bytes, peer: NodeName) -> OfferedBlocks:
        """Return the blocks that `peer` may fetch; raise UnauthorizedError if none."""
        ticket = open_ticket(self._cluster_key, raw_ticket)
        if ticket.target != peer:
            message = "the ticket is for another node"
            raise UnauthorizedError(message, code="bad_ticket")
        now_s = self._clock.monotonic_s()
        with self._lock:
            offer = self._offers.get(ticket.nonce)
            if offer is None or offer.ticket != ticket:
                message = "this node has not issued the ticket, or has withdrawn it"
                raise UnauthorizedError(message, code="bad_ticket")
            if now_s >= offer.expires_at_s:
                message = "the ticket has expired"
                raise UnauthorizedError(message, code="ticket_expired")
            self._offers[ticket.nonce] = _renew_offer(offer, now_s + offer.valid_for_s)
        return OfferedBlocks(offer.refs, offer.turn)

    def _keep(self, offer: _Offer) -> bytes:
        now_s = self._clock.monotonic_s()
        self._offers = {n: o for n, o in self._offers.items() if o.expires_at_s > now_s}
        for nonce, old in self._offers.items():
            if old.ticket == replace(offer.ticket, nonce=nonce):
                ends_at_s = max(old.ends_at_s, offer.ends_at_s)
                self._offers[nonce] = _renew_offer(
                    replace(old, ends_at_s=ends_at_s), offer.expires_at_s
                )
                return old.raw
        if len(self._offers) >= OFFERS_MAX:
            message = f"this node already has {OFFERS_MAX} open offers; retry later"
            raise OverloadedError(message)
        self._offers[offer.ticket.nonce] = offer
        return offer.raw


def _renew_offer(offer: _Offer, until_s: float) -> _Offer:
    return replace(offer, expires_at_s=min(offer.ends_at_s, max(offer.expires_at_s, until_s)))

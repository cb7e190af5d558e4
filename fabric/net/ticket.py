"""A capability to fetch one agent's blocks from one node, for one migration.

A hash alone authorizes nothing: the source signs what it offers, keeps the list of blocks it
offered, and both the signature and the list must agree with the target's request.
"""

import hmac
from dataclasses import dataclass
from hashlib import blake2b

from fabric.codec import pack, unpack
from fabric.errors import RejectedError, UnauthorizedError
from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, TenantId

_SIGNATURE_BYTES = 32


@dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to fetch an agent's blocks from a node, under a migration and an epoch."""

    migration: MigrationId
    tenant: TenantId
    agent: AgentId
    source: NodeName
    target: NodeName
    epoch: int
    blocks_digest: bytes  # over the ordered names of the offered blocks
    nonce: bytes

    @property
    def key(self) -> AgentKey:
        """The agent whose blocks may be fetched."""
        return self.tenant, self.agent


def blocks_digest(names: list[str]) -> bytes:
    """Digest the ordered names of the offered blocks."""
    return blake2b("\n".join(names).encode(), digest_size=32, person=b"mf-ticket").digest()


def _sign(cluster_key: bytes, body: bytes) -> bytes:
    return blake2b(body, digest_size=32, key=cluster_key, person=b"mf-ticket-v1").digest()


def issue_ticket(cluster_key: bytes, ticket: Ticket) -> bytes:
    """Sign `ticket` with the cluster key."""
    body = pack(ticket)
    return _sign(cluster_key, body) + body


def open_ticket(cluster_key: bytes, raw: bytes) -> Ticket:
    """Verify and decode; raise UnauthorizedError for a forged or damaged ticket."""
    signature, body = raw[:_SIGNATURE_BYTES], raw[_SIGNATURE_BYTES:]
    message = "the ticket's signature does not match"
    if not hmac.compare_digest(signature, _sign(cluster_key, body)):
        raise UnauthorizedError(message, code="bad_ticket")
    try:
        return unpack(Ticket, body)
    except RejectedError:
        raise UnauthorizedError(message, code="bad_ticket") from None

"""Control messages for fetching the beginning of a prompt from another node.

The router names the other node in the turn's request (`HeadLoan`). Only the turn's own node has the
prompt's tokens, so it requests blocks by their names, over the data plane.
"""

from dataclasses import dataclass

from fabric.errors import RejectedError, require
from fabric.ids import (
    AgentId,
    BlockHash,
    MigrationId,
    NodeName,
    TenantId,
    parse_agent_id,
    parse_block_hash,
)
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import (
    ADDRESSES_MAX,
    BLOCK_TOKENS,
    EPOCH_MAX,
    HEAD_POLL_S_MAX,
    HEAD_TOKENS_MAX,
)
from fabric.net.links import Address
from fabric.record.manifest import Placed


@dataclass(frozen=True, slots=True)
class OfferHead:
    """Request of node `target` for more of a prompt's beginning than it has, once there is more.

    `names` are those of the prompt's whole blocks, under its tenant's salt. A further request with
    the same name confirms that the blocks offered before have arrived.
    """

    migration: MigrationId
    target: NodeName
    tenant: TenantId
    names: tuple[BlockHash, ...]
    had_tokens: int
    wait_s: float  # until an answer without blocks
    is_urgent: bool = True  # a client waits

    def __post_init__(self) -> None:
        """Raise RejectedError for values out of range."""
        for name in self.names:
            parse_block_hash(name)
        is_sound = 0 < len(self.names) <= HEAD_TOKENS_MAX // BLOCK_TOKENS
        require(
            is_sound and self.had_tokens >= 0 and 0 <= self.wait_s <= HEAD_POLL_S_MAX,
            "a request for a head is out of range",
            kind=RejectedError,
            code="invalid_message",
        )


@dataclass(frozen=True, slots=True)
class LentHead:
    """Blocks of the first `tokens` tokens of an agent's context, and the ticket for them."""

    agent: AgentId
    epoch: int
    tokens: int
    blocks: tuple[BlockRef, ...]
    windows: tuple[Placed, ...]
    states: tuple[Placed, ...]
    ticket: bytes
    addresses: tuple[Address, ...]

    def __post_init__(self) -> None:
        """Raise RejectedError for values out of range."""
        parse_agent_id(self.agent)
        is_sound = 0 < self.epoch <= EPOCH_MAX and 0 < self.tokens <= HEAD_TOKENS_MAX
        require(
            is_sound and 0 < len(self.addresses) <= ADDRESSES_MAX,
            "a lent head is out of range",
            kind=RejectedError,
            code="invalid_message",
        )


@dataclass(frozen=True, slots=True)
class HeadOffer:
    """Answer to a request for a head; a running turn will publish `coming_tokens`.

    `is_preparing`: other turns of the tenant have arrived whose tokens are not known yet.
    """

    head: LentHead | None
    coming_tokens: int = 0
    is_preparing: bool = False

"""One agent as its node holds it: the last committed record, and its cache while hot."""

import asyncio
from dataclasses import dataclass, field

from fabric.control import AgentView, LastMatch, TierBytes
from fabric.ids import AgentId, TenantId
from fabric.manifest import Manifest, OwnerState
from node.mlx.resident_cache import ResidentCache
from node.prompt_plan import EMPTY_TRANSCRIPT, Transcript

AgentKey = tuple[TenantId, AgentId]


@dataclass(slots=True, eq=False)
class Agent:
    """Mutable state, touched only on the node's event loop."""

    manifest: Manifest
    saved: Manifest | None = None  # the record on disk; older than `manifest` if that failed
    cache: ResidentCache | None = None  # holds exactly the manifest's tokens while idle
    is_durable: bool = False
    came_from_peer: bool = False  # until its first turn here
    last_match: LastMatch | None = None
    turn_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting_count: int = 0
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # set unless sealed

    def __post_init__(self) -> None:
        """Start undecided only if the record says that a migration holds it."""
        if self.manifest.state is not OwnerState.SEALED:
            self.decided.set()

    @property
    def key(self) -> AgentKey:
        """Tenant and agent id."""
        return self.manifest.tenant, self.manifest.agent

    @property
    def is_busy(self) -> bool:
        """Say whether a turn runs or waits."""
        return self.turn_lock.locked() or self.waiting_count > 0

    @property
    def hot_bytes(self) -> int:
        """Memory held by the resident cache."""
        return self.cache.size_bytes if self.cache is not None else 0

    def transcript(self) -> Transcript:
        """Unpack the record for matching."""
        record = self.manifest
        if not record.token_ids:
            return EMPTY_TRANSCRIPT
        return Transcript(
            record.text.encode(),
            list(record.token_ids),
            list(record.token_ends),
            record.prompt_tokens_count,
        )

    def view(self) -> AgentView:
        """Describe the agent for operators and the directory."""
        record = self.manifest
        tiers = [name for name, has in (("hot", self.cache), ("disk", self.saved)) if has]
        return AgentView(
            tenant=record.tenant,
            agent=record.agent,
            group=record.group,
            node=record.owner,
            state=record.state,
            epoch=record.epoch,
            revision=record.revision,
            tokens=record.tokens_count,
            blocks=len(self.saved.pieces) if self.saved else 0,
            bytes=TierBytes(hot=self.hot_bytes, disk=self.saved.stored_bytes if self.saved else 0),
            tiers=tuple(tiers),
            busy=self.is_busy,
            created_s=record.created_s,
            used_s=record.used_s,
            last_match=self.last_match,
            sealed_to=record.sealed_to,
            migration=record.migration,
        )

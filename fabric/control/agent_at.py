"""How control calls name the agent that they are about: all of them alike."""

from dataclasses import dataclass

from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, TenantId


@dataclass(frozen=True, slots=True)
class AgentName:
    """Which agent of which tenant."""

    tenant: TenantId
    agent: AgentId

    @property
    def key(self) -> AgentKey:
        """Tenant and agent id."""
        return self.tenant, self.agent


@dataclass(frozen=True, slots=True)
class AgentAt(AgentName):
    """An agent at one of its epochs."""

    epoch: int


@dataclass(frozen=True, slots=True)
class OfferRequest(AgentAt):
    """Request to an owner to offer an agent to `target`, for a move or a copy."""

    migration: MigrationId
    target: NodeName

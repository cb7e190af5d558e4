"""Names of agents in control calls: tenant, agent, and often an epoch."""

from dataclasses import dataclass

from fabric.ids import AgentId, AgentKey, MigrationId, NodeName, TenantId


@dataclass(frozen=True, slots=True)
class AgentName:
    """Agent of a tenant."""

    tenant: TenantId
    agent: AgentId

    @property
    def key(self) -> AgentKey:
        """Tenant and agent."""
        return self.tenant, self.agent


@dataclass(frozen=True, slots=True)
class AgentAt(AgentName):
    """Agent at one of its epochs."""

    epoch: int


@dataclass(frozen=True, slots=True)
class OfferRequest(AgentAt):
    """Request to an owner to offer an agent to `target`, for a move or a copy."""

    migration: MigrationId
    target: NodeName

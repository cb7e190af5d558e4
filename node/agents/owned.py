"""Check that this node owns an agent before it moves, changes or records it."""

from dataclasses import dataclass

from fabric.errors import ConflictError, NotFoundError, RetryLaterError, StaleEpochError
from fabric.ids import AgentKey, MigrationId
from fabric.record.manifest import OwnerState
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.store.tombstones import TombstoneStore


@dataclass(frozen=True, slots=True)
class OwnedAgents:
    """Ownership checks of a node's agents; used on its event loop."""

    table: AgentTable
    erased: TombstoneStore

    def require(self, key: AgentKey, epoch: int | None = None) -> Agent:
        """Return an agent that this node owns, at `epoch` if given.

        Raises NotFoundError; StaleEpochError if it was erased, another node owns it, or it is at
        another epoch; RetryLaterError while it moves; ConflictError for a replica.
        """
        agent = self.table.require(key)
        self.recheck(agent, epoch)
        return agent

    def recheck(
        self, agent: Agent, epoch: int | None = None, move: MigrationId | None = None
    ) -> None:
        """Raise as `require` does, for use after a wait; `move` may have sealed the agent."""
        record, fence = agent.manifest, agent.outgoing.fence
        if self.table.get(agent.key) is not agent:
            message = f"{record.owner} no longer holds this agent"
            raise NotFoundError(message, code="agent_not_found")
        self.erased.claim_epoch(*agent.key, record.epoch)  # raises if the agent was erased
        if epoch not in {None, record.epoch}:
            message = f"the agent is at epoch {record.epoch}, not {epoch}"
            raise StaleEpochError(message)
        if record.epoch < fence:
            message = f"another node owns the agent at epoch {fence}"
            raise StaleEpochError(message)
        if record.state is OwnerState.SEALED and (move is None or record.migration != move):
            message = "the agent is being moved to another node"
            raise RetryLaterError(message, code="agent_moving")
        if record.state is OwnerState.REPLICA:
            message = f"the agent is {record.state} here"
            raise ConflictError(message, code="not_owner")

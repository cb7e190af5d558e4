"""Whose agents are this node's to give, to change or to write down."""

from dataclasses import dataclass

from fabric.errors import ConflictError, NotFoundError, RetryLaterError, StaleEpochError
from fabric.ids import AgentKey, MigrationId
from fabric.record.manifest import OwnerState
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.store.tombstones import TombstoneStore


@dataclass(frozen=True, slots=True)
class OwnedAgents:
    """Ownership of a node's agents; used on its event loop."""

    table: AgentTable
    erased: TombstoneStore

    def require(self, key: AgentKey, epoch: int | None = None) -> Agent:
        """Return an agent that this node owns; with `epoch`, at that very one.

        Raises NotFoundError; StaleEpochError where it was erased, is another node's by now, or is
        at another epoch; RetryLaterError while it moves; ConflictError for a replica.
        """
        agent = self.table.require(key)
        self.recheck(agent, epoch)
        return agent

    def recheck(
        self, agent: Agent, epoch: int | None = None, move: MigrationId | None = None
    ) -> None:
        """Raise as `require` does, also after a wait; what `move` has sealed may be sealed."""
        record, fence = agent.manifest, agent.outgoing.fence
        if self.table.get(agent.key) is not agent:
            message = f"{record.owner} holds no such agent any more"
            raise NotFoundError(message, code="agent_not_found")
        self.erased.claim_epoch(*agent.key, record.epoch)  # what was erased nobody claims
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

"""Make a replica the owner without a turn, because the node that owned its agent is lost."""

from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import TakeOver
from fabric.errors import RetryElsewhereError, StaleEpochError
from fabric.ids import NodeName
from fabric.record.manifest import OwnerState
from node.agents.agent import Agent
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords
from node.tiers.record_mending import RecordMending

TURN_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Takeovers:
    """Answers the call by which a router moves ownership to a replica on this node."""

    node: NodeName
    records: AgentRecords
    mending: RecordMending
    erased: TombstoneStore

    async def take_over(self, call: TakeOver) -> AgentView:
        """Publish the replica's record as owned at `epoch`; a repeated call changes nothing.

        Raises RetryElsewhereError without a replica, StaleEpochError for an epoch that is over,
        and DiskError.
        """
        agent = self.records.table.get(call.key)
        if agent is None:
            raise _no_replica(self.node)
        async with agent.turn_lock.held(TURN_WAIT_S):
            if not self.records.is_here(agent) or agent.saved is None:
                raise _no_replica(self.node)
            if not self._is_done(agent, call.epoch):
                await self._take_over(agent, call.epoch)
        return agent.view()

    def _is_done(self, agent: Agent, epoch: int) -> bool:
        record = agent.word
        return record.state is OwnerState.OWNED and record.epoch == epoch

    async def _take_over(self, agent: Agent, epoch: int) -> None:
        self.erased.claim_epoch(*agent.key, agent.manifest.epoch)
        record = agent.word
        if epoch <= record.epoch or epoch < agent.outgoing.fence:
            message = f"epoch {epoch} of the agent is over: it is at epoch {record.epoch}"
            raise StaleEpochError(message)
        is_copy = self.records.table.is_copy(agent)
        await self.mending.mend(agent)
        record = agent.word
        owned = replace(record, epoch=epoch, owner=self.node, state=OwnerState.OWNED)
        await self.records.republish(agent, replace(owned, revision=record.revision + 1))
        agent.outgoing.settle()
        agent.is_taken_over = is_copy


def _no_replica(node: NodeName) -> RetryElsewhereError:
    message = f"{node} has no replica of this agent"
    return RetryElsewhereError(message, code="no_replica")

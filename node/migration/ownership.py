"""Changes of ownership outside moves: releases to a new owner, and takeovers by a replica.

A release takes effect in the agent table at once, and on disk as soon as the disk accepts it:

    released ──▶ listed as a replica, its turn is cancelled ──▶ record on disk released too
                                      └── the disk refuses, or the turn runs on: retried later

Only this node retries: its list already shows the release, so no router asks for it again.
"""

import logging
from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import TakeOver
from fabric.errors import ConflictError, FabricError, RetryElsewhereError, StaleEpochError
from fabric.ids import NodeName
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.provenance import Provenance
from fabric.u32s import U32s
from node.agents.agent import Agent
from node.agents.outgoing import Successor
from node.limits import FLUSH_FAILURES_MAX
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords, RecordMending

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnershipReleases:
    """Releases of agents to their new owners; used on the event loop."""

    records: AgentRecords
    erased: TombstoneStore

    def begin(self, agent: Agent, to: Successor) -> None:
        """List the agent as owned by `to` from now on; fence an erased one without listing it."""
        if self._is_erased(agent):
            agent.outgoing.note_owned_elsewhere(to.epoch)
        else:
            agent.outgoing.note_successor(to)
            self.records.table.put(agent)

    async def finish(self, agent: Agent) -> None:
        """Write the release to disk; the caller holds the agent's turn lock.

        Raises DiskError, or ConflictError if this node's memory holds the only copy of a turn.
        """
        successor = agent.successor
        if successor is None or self._is_erased(agent) or not self.records.is_here(agent):
            return
        # A seal that was being written when the release began has ended by now.
        agent.outgoing.note_owned_elsewhere(successor.epoch)
        if _is_only_here(agent, successor):
            message = (
                "the agent is in memory only, and no other node has it; "
                "free disk space on this node, so that it is saved"
            )
            raise ConflictError(message, code="cannot_release")
        await self.records.republish(agent, _released_record(agent, successor))
        agent.cache, agent.is_durable = None, True
        self.records.hot.note()

    def _is_erased(self, agent: Agent) -> bool:
        """Return whether the agent was erased at a later epoch."""
        return self.erased.is_erased(agent.key, agent.manifest.epoch)

    async def finish_all(self) -> None:
        """Retry the releases that the disk refused; those that fail again stay pending."""
        failures = 0
        for agent in self.records.table:
            successor = agent.successor
            if successor is None or agent.is_busy or _is_only_here(agent, successor):
                continue
            async with agent.turn_lock:
                try:
                    await self.finish(agent)
                except (FabricError, OSError) as error:
                    _log.error("the disk still shows a released agent as owned here: %s", error)
                    failures += 1
            if failures == FLUSH_FAILURES_MAX:
                break


def _is_only_here(agent: Agent, successor: Successor) -> bool:
    """Return whether no node but this one has the agent's unsaved turns."""
    return agent.is_unsaved and successor.node == agent.manifest.owner


def _released_record(agent: Agent, successor: Successor) -> Manifest:
    """Return the replica's record without unsaved turns, which the new owner does not have."""
    record = agent.manifest
    durable = record if agent.is_durable else agent.saved or _without_blocks(record)
    released = replace(durable, revision=record.revision + 1, pinned=record.pinned)
    return released.as_replica(successor.node, successor.epoch)


def _without_blocks(record: Manifest) -> Manifest:
    """Return the agent's record without its blocks; it only keeps the epoch as a fence."""
    emptied = replace(record, text="", token_ids=U32s(), token_ends=U32s(), prompt_tokens_count=0)
    return replace(emptied, sketch=(), form=None, branches=None, provenance=Provenance())


TURN_WAIT_S = 10.0  # takeover's wait for the turn lock


@dataclass(frozen=True, slots=True)
class Takeovers:
    """Takeovers: replicas on this node become owners of agents whose owner is lost."""

    node: NodeName
    records: AgentRecords
    mending: RecordMending
    erased: TombstoneStore

    async def take_over(self, call: TakeOver) -> AgentView:
        """Publish the replica's record as owned at `epoch`; idempotent.

        Raises RetryElsewhereError if there is no replica, StaleEpochError for an old epoch, or
        DiskError.
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
        record = agent.effective_record
        return record.state is OwnerState.OWNED and record.epoch == epoch

    async def _take_over(self, agent: Agent, epoch: int) -> None:
        self.erased.claim_epoch(*agent.key, agent.manifest.epoch)
        record = agent.effective_record
        if epoch <= record.epoch or epoch < agent.outgoing.fence:
            message = f"epoch {epoch} is stale: the agent is already at epoch {record.epoch}"
            raise StaleEpochError(message)
        is_copy = self.records.table.is_copy(agent)
        await self.mending.mend(agent)
        record = agent.effective_record
        owned = replace(record, epoch=epoch, owner=self.node, state=OwnerState.OWNED)
        await self.records.republish(agent, replace(owned, revision=record.revision + 1))
        agent.outgoing.note_owned_here()
        agent.is_taken_over = is_copy


def _no_replica(node: NodeName) -> RetryElsewhereError:
    message = f"{node} has no replica of this agent"
    return RetryElsewhereError(message, code="no_replica")

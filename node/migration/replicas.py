"""Replicas: copies of an agent beside it, which stand by on other nodes.

Made of the owner's last saved record, whose blocks are fetched as for a move.
"""

from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import KeepReplica
from fabric.errors import ConflictError
from fabric.record.manifest import Manifest, OwnerState
from fabric.record.restore_plan import essential
from node.agents.agent import Agent
from node.migration.incoming import IncomingMoves
from node.migration.incoming_cleanup import IncomingCleanup
from node.migration.kept_copies import KeptCopies
from node.store.agent_store import AgentStore


@dataclass(frozen=True, slots=True)
class ReplicaTarget:
    """Receives replicas from other nodes."""

    store: AgentStore
    moves: IncomingMoves
    copies: KeptCopies
    end: IncomingCleanup

    async def keep(self, call: KeepReplica) -> AgentView:
        """Publish the record as a replica; repeatable, and never in place of something later."""
        decoded = await self.copies.decoded(call.manifest)
        offered = essential(decoded, self.store.spec.window_tokens)
        # A commit may make this node the owner.
        async with self.moves.deciding(offered.key):
            return await self._keep(call, offered)

    async def _keep(self, call: KeepReplica, offered: Manifest) -> AgentView:
        table = self.copies.records.table
        agent = table.get(offered.key)
        if agent is not None:
            _check_replaceable(agent, offered)
        else:
            table.require_place()
        previous = agent.saved if agent is not None else None
        record = _replica(offered, call, previous)
        if previous is not None and replace(record, revision=previous.revision) == previous:
            await self.end.let_go(call.migration, ())
            assert agent is not None, "whose record it is"
            return agent.view()
        agent = agent or Agent(record)
        await self.copies.publish(agent, record, call.migration)
        return agent.view()


def _replica(offered: Manifest, call: KeepReplica, previous: Manifest | None) -> Manifest:
    revision = offered.revision
    if previous is not None and previous.epoch == offered.epoch:
        # A record never goes back. What an owner that gave way left behind may count more turns
        # than its successor's does.
        revision = max(revision, previous.revision + 1)
    return replace(
        offered,
        state=OwnerState.REPLICA,
        owner=call.source,
        revision=revision,
        migration=None,
        sealed_to=None,
        provenance=replace(offered.provenance, copied_revision=offered.revision, is_kept=call.kept),
    )


def _check_replaceable(agent: Agent, offered: Manifest) -> None:
    known = agent.word
    if known.state is not OwnerState.REPLICA:
        message = f"the agent is {known.state} here"
        raise ConflictError(message, code="not_a_replica")
    copied = known.provenance.copied_revision or 0
    if (known.epoch, copied) > (offered.epoch, offered.revision):
        message = f"a later copy is here: epoch {known.epoch}, revision {copied}"
        raise ConflictError(message, code="stale_copy")
    if agent.is_busy:
        message = "a turn takes the agent over"
        raise ConflictError(message, code="agent_busy")

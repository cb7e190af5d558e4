"""The source's side of a migration: offer, seal, release, or take back.

Until the target has committed, the source owns the agent. From the seal on it serves no turn of
it, and the seal is on disk, so that a crash leaves no second owner.
"""

import asyncio
import logging
from dataclasses import dataclass, replace

from fabric.control.node_calls import (
    AbortMigration,
    Done,
    Offer,
    OfferMigration,
    ReleaseAgent,
    SealAgent,
)
from fabric.errors import ConflictError, RetryLaterError
from fabric.ids import MigrationId
from fabric.record.manifest import OwnerState
from node.agents.agent import Agent, LiveTurn
from node.agents.outgoing import Successor
from node.agents.owned import OwnedAgents
from node.engine.moving_streams import MovingStreams
from node.migration.ownership import OwnershipReleases
from node.migration.record_offers import RecordOffers
from node.runtime.health import Health
from node.store.posix_disk import DiskError
from node.tiers.agent_records import AgentRecords, RecordMending

_log = logging.getLogger(__name__)

_NOT_STOPPED = "a turn of this agent has not stopped yet"
SEAL_WAIT_S = 8.0  # wait for a running turn; the caller's own limit is longer


@dataclass(frozen=True, slots=True)
class MoveSource:
    """Source node's side of a move."""

    records: AgentRecords
    mending: RecordMending
    offers: RecordOffers
    owned: OwnedAgents
    releases: OwnershipReleases
    moving: MovingStreams
    health: Health

    async def offer(self, call: OfferMigration) -> Offer:
        """Offer the agent's blocks so far, while it continues to serve turns.

        A running turn's full blocks are saved first, so each repeated offer leaves less to copy
        when the agent is sealed.
        """
        agent = self.owned.require(call.key, call.epoch)
        if agent.turn is not None:
            return await self._offer_live(call, agent, agent.turn)
        if agent.saved is None:
            message = "the agent has no finished turn to move yet"
            raise ConflictError(message, code="nothing_saved")
        await self.mending.repair(agent, verify=call.verify)
        self.owned.recheck(agent, call.epoch)
        return self.offers.add(call, agent.saved)

    async def _offer_live(self, call: OfferMigration, agent: Agent, turn: LiveTurn) -> Offer:
        stored = agent.saved
        if call.verify and stored is not None:  # lost blocks are saved again from memory
            await self.records.verify(stored)
        running = await turn.save_now() or agent.saved
        self.owned.recheck(agent, call.epoch)
        if running is None and agent.manifest.token_ids:
            # The disk refused the turn: it is in memory only, and cannot be copied.
            if self.health.degraded is not None:
                message = f"the agent is in memory only: {self.health.degraded}"
                raise DiskError(message)
            message = "no turn of the agent is on disk yet; retry later"
            raise RetryLaterError(message, code="nothing_saved")
        return replace(self.offers.add(call, running or agent.manifest), live=True)

    async def seal(self, call: SealAgent) -> Offer:
        """Stop serving the agent and offer its final record; idempotent, even concurrently."""
        agent = self.records.table.require(call.key)
        if (offer := self._sealed(call, agent)) is not None:
            return offer
        try:
            async with asyncio.timeout(SEAL_WAIT_S):
                if agent.turn is not None:
                    agent.turn.hand_over(call)
                    # The target need not wait for the turn's last event.
                    await agent.turn.saved.wait()
                    if (offer := self._sealed(call, agent)) is not None:
                        return offer
                await agent.turn_lock.acquire()
        except TimeoutError:
            message = "a turn of this agent is still running; retry later"
            raise RetryLaterError(message, code="agent_busy") from None
        try:
            if (offer := self._sealed(call, agent)) is not None:  # sealed by a repeat of this call
                return offer
            if agent.saved is None or not agent.is_durable:
                message = "the agent cannot be sealed: its last turn is not on disk"
                raise ConflictError(message, code="cannot_seal")
            await self.mending.mend(agent)
            record = agent.manifest
            sealed = replace(
                record.sealed(call.migration, call.target), revision=record.revision + 1
            )
            await self.records.republish(agent, sealed)
            agent.outgoing.note_sealed()
            return self.offers.add(call, agent.manifest)
        finally:
            agent.turn_lock.release()

    def _sealed(self, call: SealAgent, agent: Agent) -> Offer | None:
        """Return the final offer if this move has sealed the agent; raise if it may not seal it."""
        self.owned.recheck(agent, call.epoch, call.migration)
        is_sealed = agent.manifest.state is OwnerState.SEALED
        return self.offers.add(call, agent.manifest) if is_sealed else None

    async def release(self, call: ReleaseAgent) -> Done:
        """Release the agent to the owner of a later epoch; its record stays as a replica."""
        self.offers.withdraw(call.migration)
        agent = self.records.table.get(call.key)
        if agent is None or agent.manifest.epoch >= call.epoch:
            return Done("nothing to release")
        # At once, even if the rest fails: a turn that runs here must no longer be acknowledged.
        self.releases.begin(agent, Successor(call.owner, call.epoch))
        if agent.turn is not None:
            agent.turn.cancel()
        async with agent.turn_lock.held(SEAL_WAIT_S, _NOT_STOPPED):
            await self.releases.finish(agent)
        return Done()

    async def take_back(self, call: AbortMigration) -> Done:
        """Undo the seal of this migration; idempotent."""
        self.offers.withdraw(call.migration)
        self.moving.end_pause(call.migration)
        agent = self.records.table.get(call.key)
        if agent is not None and agent.turn is not None:
            await agent.turn.keep(call.migration)
        if agent is None or not _is_sealed_by(agent, call.migration):
            return Done("nothing to abort")
        async with agent.turn_lock.held(SEAL_WAIT_S, _NOT_STOPPED):
            # Meanwhile, a repeat of this call may have undone it, or an erasure removed the agent.
            if self.records.is_here(agent) and _is_sealed_by(agent, call.migration):
                await self._take_back(agent)
        return Done()

    async def _take_back(self, agent: Agent) -> None:
        owned = replace(
            agent.manifest,
            state=OwnerState.OWNED,
            revision=agent.manifest.revision + 1,
            migration=None,
            sealed_to=None,
        )
        try:
            await self.records.republish(agent, owned)
        except DiskError as error:
            # The router knows that no other node owns it. A restart finds it sealed, and the router
            # repeats the abort; until then it is served, and the write is retried.
            _log.error("the seal of an agent is undone in memory only: %s", error.message)
            agent.manifest = replace(agent.manifest, state=OwnerState.OWNED, migration=None)
            agent.manifest = replace(agent.manifest, sealed_to=None)
            self.records.table.put(agent)
        agent.outgoing.note_owned_here()


def _is_sealed_by(agent: Agent, migration: MigrationId) -> bool:
    is_sealed = agent.effective_record.state is OwnerState.SEALED
    return is_sealed and agent.manifest.migration == migration

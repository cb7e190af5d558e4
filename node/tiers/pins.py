"""Pins of agents, stored in their records, so that they survive restarts and moves."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from fabric.control.node_calls import AgentView, PinAgent
from fabric.errors import FabricError
from fabric.record.manifest import OwnerState
from node.agents.agent import Agent
from node.agents.owned import OwnedAgents
from node.tiers.agent_records import AgentRecords, RecordMending, despite_losses

PIN_WAIT_S = 2.0  # for a running turn; a longer turn saves the pin at its end

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pins:
    """Pins of the agents on one node."""

    records: AgentRecords
    mending: RecordMending

    async def persist_all(self) -> None:
        """Save pins and returned ownerships of idle agents whose last save failed or is pending."""
        for agent in self.records.table:
            if not agent.is_busy and is_owing(agent):
                async with agent.turn_lock:
                    try:
                        await self.persist(agent)
                    except FabricError as error:
                        _log.warning("a pin is in memory only: %s", error)

    async def persist(self, agent: Agent) -> None:
        """Save the pin of an agent; the caller holds its turn lock. Raises DiskError."""
        await despite_losses(lambda: self._persist(agent))

    async def _persist(self, agent: Agent) -> None:
        if not self.records.is_here(agent) or not is_owing(agent):
            return
        await self.mending.mend(agent)
        saved = agent.saved
        if saved is None or not is_owing(agent):  # the repair has saved the pin already
            return
        record = replace(agent.manifest, revision=agent.manifest.revision + 1)
        await self.records.publish(record, saved)
        agent.take_record(record)
        self.records.table.put(agent)


@dataclass(frozen=True, slots=True)
class Pinning:
    """Handler of PinAgent calls; `weigh` recomputes which pins are honored."""

    owned: OwnedAgents
    pins: Pins
    weigh: Callable[[], Awaitable[None]]

    async def pin(self, call: PinAgent) -> AgentView:
        """Pin or unpin an agent; raise DiskError, or an error of `OwnedAgents.require`."""
        agent = self.owned.require(call.key)
        if agent.manifest.pinned != call.pinned:
            agent.manifest = replace(agent.manifest, pinned=call.pinned)
            self.owned.table.put(agent)
        try:
            await asyncio.wait_for(agent.turn_lock.acquire(), PIN_WAIT_S)
        except TimeoutError:
            return agent.view()
        try:
            self.owned.recheck(agent)
            await self.pins.persist(agent)
        finally:
            agent.turn_lock.release()
        await self.weigh()  # a new pin may displace other pins
        return agent.view()


def is_owing(agent: Agent) -> bool:
    """Return whether the record on disk has another pin or state than the one in memory."""
    saved, record = agent.saved, agent.manifest
    if saved is None or not agent.is_durable:
        return False
    was_sealed = saved.state is OwnerState.SEALED and record.state is OwnerState.OWNED
    return was_sealed or saved.pinned != record.pinned

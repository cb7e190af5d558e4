"""Pin an agent: said in its record, so that it outlives restarts and moves."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.control.node_calls import AgentView, PinAgent
from fabric.errors import ConflictError, FabricError
from fabric.record.manifest import OwnerState
from node.agents.agent import Agent
from node.tiers.record_mending import mend

if TYPE_CHECKING:
    from node.node import Node

PIN_WAIT_S = 2.0  # for a running turn; a longer one's own save carries the pin

_log = logging.getLogger(__name__)


async def pin(node: "Node", call: PinAgent) -> AgentView:
    """Pin or unpin an agent; raise ConflictError where this node does not own it, or DiskError."""
    agent = node.table.require((call.tenant, call.agent))
    record = agent.manifest
    if record.state is not OwnerState.OWNED:
        message = f"the agent is {record.state} here"
        raise ConflictError(message, code="not_owner")
    if record.pinned != call.pinned:
        agent.manifest = replace(record, pinned=call.pinned)
        node.table.put(agent)
    try:
        await asyncio.wait_for(agent.turn_lock.acquire(), PIN_WAIT_S)
    except TimeoutError:
        return agent.view()
    try:
        if node.table.get(agent.key) is not agent or agent.manifest.state is not OwnerState.OWNED:
            message = "the agent was moved or erased meanwhile"
            raise ConflictError(message, code="not_owner")
        await _persist(node, agent)
    finally:
        agent.turn_lock.release()
    await node.reclaim.round()  # whether the pin is honoured depends on all others
    return agent.view()


async def persist_pins(node: "Node") -> None:
    """Save pins and take-backs of idle agents that the disk refused, or could not have yet."""
    for agent in node.table:
        if not agent.is_busy and is_owing(agent):
            async with agent.turn_lock:
                try:
                    await _persist(node, agent)
                except FabricError as error:
                    _log.warning("a pin is in memory only: %s", error)


def is_owing(agent: Agent) -> bool:
    """Say whether the record on disk tells another pin or state than memory does."""
    saved, record = agent.saved, agent.manifest
    if saved is None or not agent.is_durable:
        return False
    was_sealed = saved.state is OwnerState.SEALED and record.state is OwnerState.OWNED
    return was_sealed or saved.pinned != record.pinned


async def _persist(node: "Node", agent: Agent) -> None:
    if node.table.get(agent.key) is not agent or not is_owing(agent):
        return
    await mend(node, agent)
    saved = agent.saved
    if saved is None or not is_owing(agent):  # it was saved from memory, as it is now
        return
    record = replace(agent.manifest, revision=agent.manifest.revision + 1)
    await node.in_worker(lambda: node.store.publish(record, saved))
    agent.take_record(record)
    node.table.put(agent)

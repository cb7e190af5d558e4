"""Pin an agent: said in its record, so that it outlives restarts and moves."""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.control import AgentView, PinAgent
from fabric.errors import ConflictError, FabricError
from fabric.manifest import OwnerState
from node.agent import Agent
from node.migration_source import owned_agent

if TYPE_CHECKING:
    from node.node import Node

PIN_WAIT_S = 2.0  # for a running turn; a longer one's own save carries the pin

_log = logging.getLogger(__name__)


async def pin(node: "Node", call: PinAgent) -> AgentView:
    """Pin or unpin an agent; raise ConflictError where this node does not own it."""
    agent = owned_agent(node, call.tenant, call.agent)
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
        await _persist(node, agent)
    finally:
        agent.turn_lock.release()
    await node.reclaim.round()  # whether the pin is honoured depends on all others
    return agent.view()


async def persist_pins(node: "Node") -> None:
    """Save pins of idle agents whose turns came to nothing before they could."""
    for agent in node.table:
        if not agent.is_busy and is_owing(agent):
            async with agent.turn_lock:
                try:
                    await _persist(node, agent)
                except FabricError as error:
                    _log.warning("a pin is in memory only: %s", error)


def is_owing(agent: Agent) -> bool:
    """Say whether the record on disk tells another pin than memory does."""
    saved = agent.saved
    return saved is not None and agent.is_durable and saved.pinned != agent.manifest.pinned


async def _persist(node: "Node", agent: Agent) -> None:
    saved = agent.saved
    is_here = node.table.get(agent.key) is agent
    if saved is None or not is_here or not is_owing(agent):
        return
    record = replace(agent.manifest, revision=agent.manifest.revision + 1)
    await node.in_worker(lambda: node.store.publish(record, saved))
    agent.manifest = replace(record, pinned=agent.manifest.pinned)  # asked anew meanwhile, perhaps
    agent.saved = record
    node.table.put(agent)

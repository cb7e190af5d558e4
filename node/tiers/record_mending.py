"""An idle agent whose record lost blocks to the drive: made whole from memory, or cut short.

Its next turn would do the same. What cannot wait for that (a move, a copy, a pin) does it first,
so that one lost block keeps nobody where it is.
"""

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.errors import RetryLaterError
from fabric.record.manifest import OwnerState
from fabric.record.truncate import cut_record
from node.agents.agent import Agent
from node.store.stock import stock_of
from node.tiers.record_writer import RecordWriter

if TYPE_CHECKING:
    from node.node import Node

MEND_WAIT_S = 8.0  # for a turn that has begun meanwhile

_log = logging.getLogger(__name__)


async def whole(node: "Node", agent: Agent, *, verify: bool = False) -> None:
    """Have all blocks of the agent's record stored; with `verify`, read them first.

    Raises DiskError, or RetryLaterError where a turn of it lasts.
    """
    saved = agent.saved
    if saved is not None and verify:
        await node.in_worker(lambda: node.store.blocks.verify(dict.fromkeys(saved.refs)))
    if saved is None or not node.store.missing(saved):
        return
    try:
        await asyncio.wait_for(agent.turn_lock.acquire(), MEND_WAIT_S)
    except TimeoutError:
        message = "a turn of this agent is still running"
        raise RetryLaterError(message, code="agent_busy") from None
    try:
        if node.table.get(agent.key) is agent:
            await mend(node, agent)
    finally:
        agent.turn_lock.release()


async def mend(node: "Node", agent: Agent, *, may_cut: bool = True) -> bool:
    """Make the record whole under the agent's turn lock; say whether it is. Raises DiskError."""
    saved, cache, record = agent.saved, agent.cache, agent.manifest
    if saved is None or not agent.is_durable:
        return True  # who saves it again looks for itself
    lost = await node.in_worker(lambda: node.store.missing(saved))
    if not lost:
        return True
    later = replace(record, revision=record.revision + 1)
    if cache is not None and record.state is OwnerState.OWNED and record.token_ids:
        stock = stock_of(saved, agent.stored_tokens)
        writer = RecordWriter(node, agent, cache, stock, agent.stored_tokens)
        made = await writer.publish(later, record.tokens_count)
        agent.note_saved(made, writer.spans)
    elif may_cut:
        made = cut_record(later, set(lost))
        await node.in_worker(lambda: node.store.publish(made, saved))
        agent.cache, agent.stored_tokens = None, 0
        agent.take_record(made)
    else:
        return False
    node.table.put(agent)
    node.note_hot()
    _log.warning("an agent lost %d blocks; %d tokens are left", len(lost), made.tokens_count)
    return True

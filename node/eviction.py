"""Take agents off a node: evicted for room, made smaller, or erased because somebody said so.

All of it happens under the agents' turn locks. The record goes first and durably, then what
nobody else refers to: a crash in between leaves blocks that recovery removes.
"""

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.control import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.errors import FabricError, TooLargeError
from fabric.limits import EPOCH_MAX, EVICTIONS_MAX, TOMBSTONES_MAX
from fabric.manifest import Manifest, OwnerState
from fabric.restore_plan import essential
from node.agent import Agent, AgentKey
from node.posix_disk import DiskError

if TYPE_CHECKING:
    from node.node import Node

_log = logging.getLogger(__name__)


def is_active(agent: Agent, offered: AbstractSet[AgentKey]) -> bool:
    """Say whether an agent must stay: at work, offered to another node, or not saved."""
    return (
        agent.is_busy
        or agent.is_unsaved
        or agent.manifest.state is OwnerState.SEALED
        or agent.key in offered
    )


async def evict(node: "Node", chosen: Sequence[Agent]) -> int:
    """Let agents go with their records and caches; count them. Raise DiskError.

    Who has become active meanwhile stays.
    """
    count = 0
    for start in range(0, len(chosen), EVICTIONS_MAX):
        count += await _evict_some(node, chosen[start : start + EVICTIONS_MAX])
    return count


async def _evict_some(node: "Node", chosen: Sequence[Agent]) -> int:
    offered = node.transfers.offered_agents()
    idle = [a for a in chosen if node.table.get(a.key) is a and not is_active(a, offered)]
    for agent in idle:
        await agent.turn_lock.acquire()  # at once, since nobody holds it
    try:
        records = [agent.saved for agent in idle if agent.saved is not None]
        await node.in_worker(lambda: node.store.evict(records))
        for agent in idle:
            agent.cache, agent.was_evicted = None, True
            node.table.forget(agent)
    finally:
        for agent in idle:
            agent.turn_lock.release()
    node.note_hot()
    return len(idle)


def thinned(node: "Node", record: Manifest) -> Manifest | None:
    """Return the record without what only earlier points of it need; None if that is all."""
    least = essential(record, node.spec.window_tokens)
    is_thin = (least.windows, least.states) == (record.windows, record.states)
    return None if is_thin else replace(least, revision=record.revision + 1)


async def thin(node: "Node", agent: Agent) -> bool:
    """Drop an idle agent's old windows and states; say whether that was possible."""
    record = agent.saved
    if record is None or not agent.is_durable or agent.is_busy:
        return False
    smaller = thinned(node, agent.manifest)
    if smaller is None:
        return False
    async with agent.turn_lock:
        await node.in_worker(lambda: node.store.publish(smaller, record))
        agent.manifest = agent.saved = smaller
        node.table.put(agent)
    return True


async def erase(node: "Node", call: EraseAgent) -> EraseReceipt:
    """Remove every byte of an agent, quarantined ones included; repeatable. Raise DiskError."""
    if not call.epoch:
        return await _erase(node, (call.tenant, call.agent), EPOCH_MAX)
    words = (call.tenant, call.agent, call.epoch, call.erased_s)
    tombstone = None
    with suppress(DiskError):  # a full disk has room afterwards
        tombstone = await node.in_worker(lambda: node.erased.note(*words))
    receipt = await _erase(node, (call.tenant, call.agent), call.epoch)
    if tombstone is None:
        with suppress(DiskError):
            tombstone = await node.in_worker(lambda: node.erased.note(*words))
    return replace(receipt, tombstone=tombstone)


async def take_erasures(node: "Node", call: ShareErasures) -> KnownErasures:
    """Remove what others were told to erase while this node was away. Raise DiskError."""
    if len(call.erased) > TOMBSTONES_MAX:
        message = f"over {TOMBSTONES_MAX} tombstones"
        raise TooLargeError(message)
    await node.in_worker(lambda: node.erased.take(call.erased))
    return KnownErasures(node.erased.all, await _remove_erased(node))


async def finish_erasures(node: "Node") -> None:
    """Remove what the disk refused to let go of; where it refuses again, it stays owed.

    Nobody else asks again: by its tombstones this node knows of the erasure, as the others do.
    """
    node.owes_erasures = False
    try:
        await _remove_erased(node)
        # Of an agent that left the table half way only these may be left.
        await node.in_worker(node.store.blocks.sweep)
        await node.in_worker(node.store.blocks.empty_quarantine)
    except (FabricError, OSError) as error:
        node.owes_erasures = True
        _log.error("an erased agent is not all gone from the disk: %s", error)


async def _remove_erased(node: "Node") -> int:
    """Remove every agent that a tombstone names; count them."""
    count = 0
    for agent in node.table:
        # Not only for the news: an earlier attempt may have failed half way.
        epoch = node.erased.floor(*agent.key)
        if agent.manifest.epoch <= epoch:
            count += (await _erase(node, agent.key, epoch)).existed
    return count


async def _erase(node: "Node", key: AgentKey, epoch: int) -> EraseReceipt:
    try:
        return await _erase_whole(node, key, epoch)
    except (FabricError, OSError):
        node.owes_erasures = True
        raise


async def _erase_whole(node: "Node", key: AgentKey, epoch: int) -> EraseReceipt:
    agent = node.table.get(key)
    if agent is None:
        await node.in_worker(node.store.blocks.sweep)  # perhaps what an earlier call could not
        return EraseReceipt(node.name, existed=False)
    await node.prefetches.stop(agent)
    async with agent.turn_lock:
        if node.table.get(agent.key) is not agent or agent.manifest.epoch > epoch:
            # Another call erased it meanwhile, or it is a later agent of the same name.
            return EraseReceipt(node.name, existed=False)
        # In the table until it is gone: a turn that comes meanwhile waits for the lock.
        saved, agent.cache = agent.saved, None
        receipt = EraseReceipt(node.name, existed=True)
        if saved is not None:
            await node.in_worker(lambda: node.store.erase_record(saved))
            node.table.forget(agent)  # its blocks are let go of: a repeat must not do so again
            erased = await node.in_worker(lambda: node.store.erase_blocks(saved))
            # A quarantined file may hold tokens of an agent that no record names any more.
            await node.in_worker(node.store.blocks.empty_quarantine)
            receipt = replace(
                receipt,
                record_removed=True,
                blocks_removed=erased.blocks_removed,
                bytes_removed=erased.bytes_removed,
                blocks_kept_shared=erased.blocks_kept_shared,
                bytes_kept_shared=erased.bytes_kept_shared,
            )
        node.table.forget(agent)
    agent.decided.set()
    node.note_hot()
    return receipt

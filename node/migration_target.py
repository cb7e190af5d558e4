"""The target's side of a migration: fetch what is missing, then own the agent.

Nothing that a peer says is believed: block names are recomputed from the tokens under this
cluster's key, and every block's bytes are checked before they are stored.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.block import BlockRef
from fabric.control import (
    NOTHING_COPIED,
    AgentView,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
)
from fabric.errors import (
    ConflictError,
    FabricError,
    RejectedError,
    RetryLaterError,
    UnauthorizedError,
)
from fabric.ids import MigrationId
from fabric.limits import FILE_ALIGN_BYTES
from fabric.manifest import Manifest, OwnerState, decode_manifest
from fabric.restore_plan import essential
from fabric.urgency import Urgency
from node.agent import Agent
from node.posix_disk import DiskError

if TYPE_CHECKING:
    from fabric.block_chain import BlockSpan
    from node.node import Node

_log = logging.getLogger(__name__)

ADOPTED_S = 3_600.0  # without a new block for so long, no copy of that move goes on
COMMIT_WAIT_S = 8.0  # for whoever holds a copy of the agent here
ABORTED_MAX = 1_024  # remembered; a commit later than that many aborts is caught by its epoch


async def copy_blocks(node: "Node", call: CopyBlocks) -> Copied:
    """Fetch, verify and publish the offered record's blocks that are not here yet."""
    record = _checked(node, call.offer.manifest)
    try:
        copied = await _copy(node, call, record)
        if call.offer.live or call.migration in node.arrivals:
            await node.arrivals.extend(call.migration, record)
    finally:
        await _forget_if_aborted(node, call.migration)
    return copied


async def _copy(node: "Node", call: CopyBlocks, record: Manifest) -> Copied:
    missing_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in node.store.missing(record))
    if missing_bytes:
        spare_only = call.urgency is Urgency.PREFETCH  # then no owned agent may go for it
        await node.reclaim.make_room(record.tenant, missing_bytes, spare_only=spare_only)
    try:
        return await node.in_fetcher(lambda: _fetch(node, call, record))
    except UnauthorizedError as error:  # towards the router this would be about its own secret
        message = f"{call.source} does not offer the agent any more ({error.message})"
        raise ConflictError(message, code=error.code) from None


def _checked(node: "Node", raw: bytes) -> Manifest:
    record = decode_manifest(raw)
    if record.fingerprint != node.fingerprint:
        message = f"{node.name} runs another model than this agent's"
        raise ConflictError(message, code="fingerprint_mismatch")
    return essential(record, node.spec.window_tokens)


def _fetch(node: "Node", call: CopyBlocks, record: Manifest) -> Copied:
    began = node.clock.monotonic_s()
    by_name = {ref.name: span for ref, span in node.store.named_refs(record)}
    missing = node.store.missing(record)
    if not missing:
        return Copied(0, len(by_name), 0, 0.0)
    buffers: dict[str, memoryview] = {}

    def allocate(ref: BlockRef) -> memoryview:
        return buffers.setdefault(ref.name, memoryview(bytearray(ref.payload_bytes)))

    def adopt(ref: BlockRef, payload: memoryview) -> None:
        span: BlockSpan = by_name[ref.name]
        tokens = record.token_ids[span.start : span.end]
        node.store.blocks.adopt(ref, span.parent, tokens, payload)
        node.adopted.setdefault(call.migration, []).append(ref)
        node.adopted_s[call.migration] = node.clock.monotonic_s()
        buffers.pop(ref.name, None)

    report = node.fetch(
        call.offer.addresses,
        name=node.name,
        source=call.source,
        cluster_key=node.config.cluster_key,
        fingerprint=node.fingerprint,
        ticket=call.offer.ticket,
        refs=missing,
        allocate=allocate,
        done=adopt,
        urgency=call.urgency,
        links=node.links,
        connections=node.connections,
    )
    return Copied(
        blocks_sent=report.blocks,
        blocks_reused=len(by_name) - len(missing),
        bytes_sent=report.bytes,
        seconds=node.clock.monotonic_s() - began,
    )


async def _forget_if_aborted(node: "Node", migration: MigrationId) -> None:
    """Let go of what came after a move was given up: it is in nobody's way."""
    if migration in node.aborted:
        await forget(node, migration)


async def forget(node: "Node", migration: MigrationId) -> None:
    """Let go of a migration that came to nothing, and refuse to commit it later."""
    async with node.deciding:  # a commit under way ends first: who asks then is told of it
        await _forget(node, migration)


async def _forget(node: "Node", migration: MigrationId) -> None:
    node.aborted[migration] = None
    while len(node.aborted) > ABORTED_MAX:
        node.aborted.popitem(last=False)
    node.arrivals.drop(migration)
    node.landings.note(migration)
    await let_go(node, migration, ())


async def let_go(node: "Node", migration: MigrationId, kept: Iterable[BlockRef]) -> None:
    """Take back the pins of what a migration brought, but for those its record has taken."""
    node.adopted_s.pop(migration, None)
    pins = Counter(node.adopted.pop(migration, ()))
    pins.subtract(set(kept))
    if not +pins:
        return
    while pins := +pins:  # a call that came twice has pinned twice
        node.store.blocks.abandon(pins)
        pins.subtract(list(pins))
    with suppress(DiskError):  # what nobody needs may stay a while
        await node.in_worker(node.store.blocks.sweep)


async def forget_stale(node: "Node", idle_s: float = ADOPTED_S) -> int:
    """Let go of migrations whose router is gone: nothing came for `idle_s` seconds; count them."""
    now_s = node.clock.monotonic_s()
    stale = [name for name, at_s in list(node.adopted_s.items()) if now_s - at_s >= idle_s]
    for migration in stale:
        await forget(node, migration)
    return len(stale)


async def commit(node: "Node", call: CommitMigration) -> Committed:
    """Fetch what is missing and own the agent at `call.epoch`. Repeatable.

    One call, as a client waits for its next token meanwhile. Its durable publish is the commit.
    """
    record = _checked(node, call.offer.manifest)
    copied = NOTHING_COPIED
    if _committed(node, call, record) is None:
        tail = CopyBlocks(call.migration, call.source, call.offer, Urgency.MIGRATION_TAIL)
        try:
            copied = await _copy(node, tail, record)
        finally:
            await _forget_if_aborted(node, call.migration)
    try:
        view = await _decide(node, call, record)
    finally:
        node.landings.note(call.migration)
    return Committed(view, copied)


async def _decide(node: "Node", call: CommitMigration, record: Manifest) -> AgentView:
    async with node.deciding:
        agent = node.table.get((record.tenant, record.agent))
        if agent is None or agent.manifest.epoch >= call.epoch:  # new here, or a repeat
            return await _commit(node, call, record)
        try:  # a replica of it may be on its way out, or a turn may take it over
            await asyncio.wait_for(agent.turn_lock.acquire(), COMMIT_WAIT_S)
        except TimeoutError:
            message = "the agent is at work here"
            raise RetryLaterError(message, code="agent_busy") from None
        try:
            return await _commit(node, call, record)
        finally:
            agent.turn_lock.release()


def _committed(node: "Node", call: CommitMigration, record: Manifest) -> AgentView | None:
    """Return the agent if this very call was carried out before; raise if it never can be."""
    agent = node.table.get((record.tenant, record.agent))
    if agent is not None and agent.manifest.epoch >= call.epoch:
        if agent.manifest.owner == node.name and agent.manifest.migration == call.migration:
            return agent.view()
        message = f"the agent is already at epoch {agent.manifest.epoch} here"
        raise ConflictError(message, code="stale_epoch")
    if call.migration in node.aborted:
        message = "this migration was aborted"
        raise ConflictError(message, code="aborted")
    if record.epoch >= call.epoch:
        message = f"epoch {call.epoch} does not follow {record.epoch}"
        raise RejectedError(message, code="stale_epoch")
    return None


async def _load_tail(node: "Node", migration: MigrationId, record: Manifest) -> None:
    """Read the end of what arrives to memory, if its beginning is there."""
    if migration not in node.arrivals:
        return
    try:
        await node.arrivals.extend(migration, record)
    except (FabricError, OSError) as error:  # then the next turn restores it
        _log.warning("the end of an agent on its way in was not loaded: %s", error)


async def _commit(node: "Node", call: CommitMigration, record: Manifest) -> AgentView:
    repeated = _committed(node, call, record)
    if repeated is not None:
        return repeated
    agent = node.table.get((record.tenant, record.agent))
    owned = replace(
        record,
        state=OwnerState.OWNED,
        owner=node.name,
        epoch=call.epoch,
        revision=record.revision + 1,
        migration=call.migration,  # remembered, so that a repeated commit is recognised
        sealed_to=None,
    )
    if await node.in_worker(lambda: node.store.missing(owned)):
        message = "not all of the agent's blocks have arrived"
        raise ConflictError(message, code="blocks_missing")
    previous = agent.saved if agent is not None else None
    loading = asyncio.create_task(_load_tail(node, call.migration, record))
    try:
        await node.in_worker(lambda: node.store.publish(owned, previous))
    finally:
        await loading
    if agent is None:
        agent = Agent(owned)
    agent.manifest = agent.saved = owned
    agent.cache = node.arrivals.take(call.migration, owned)
    agent.stored_tokens = owned.tokens_count if agent.cache else 0
    agent.is_durable, agent.came_from_peer = True, agent.cache is None
    agent.decided.set()
    node.table.put(agent)
    node.note_hot()
    # The record holds its blocks now; a tail that was copied before the last one is in nobody's.
    await let_go(node, call.migration, owned.refs)
    return agent.view()

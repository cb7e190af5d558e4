"""The target's side of a migration: fetch what is missing, then own the agent.

Nothing that a peer says is believed: block names are recomputed from the tokens under this
cluster's key, and every block's bytes are checked before they are stored.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.control.node_calls import (
    NOTHING_COPIED,
    AgentView,
    CommitMigration,
    Committed,
    Copied,
    CopyBlocks,
)
from fabric.errors import (
    UNDECIDED,
    ConflictError,
    FabricError,
    RejectedError,
    RetryLaterError,
    UnauthorizedError,
)
from fabric.ids import AgentKey, MigrationId
from fabric.kvcache.block import BlockRef
from fabric.limits import FILE_ALIGN_BYTES
from fabric.net.urgency import Urgency
from fabric.record.manifest import Manifest, OwnerState, decode_manifest
from fabric.record.restore_plan import essential
from node.agents.agent import Agent
from node.migration.adoption import Adoption
from node.store.posix_disk import DiskError

if TYPE_CHECKING:
    from fabric.kvcache.block_chain import BlockSpan
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
        await _forget_if_aborted(node, call.migration, record)
    return copied


async def _copy(node: "Node", call: CopyBlocks, record: Manifest) -> Copied:
    missing_bytes = sum(ref.payload_bytes + FILE_ALIGN_BYTES for ref in node.store.missing(record))
    if missing_bytes:
        spare_only = call.urgency is Urgency.PREFETCH  # then no owned agent may go for it
        await node.reclaim.make_room(record.tenant, missing_bytes, spare_only=spare_only)
    loop = asyncio.get_running_loop()

    def arrived(ref: BlockRef) -> None:
        loop.call_soon_threadsafe(_note_arrival, node, call.migration, record, ref)

    try:
        return await node.in_fetcher(lambda: _fetch(node, call, record, arrived))
    except UnauthorizedError as error:  # towards the router this would be about its own secret
        message = f"{call.source} does not offer the agent any more ({error.message})"
        raise ConflictError(message, code=error.code) from None


def _checked(node: "Node", raw: bytes) -> Manifest:
    record = decode_manifest(raw)
    if record.fingerprint != node.fingerprint:
        message = f"{node.name} runs another model than this agent's"
        raise ConflictError(message, code="fingerprint_mismatch")
    return essential(record, node.spec.window_tokens)


def _note_arrival(node: "Node", migration: MigrationId, record: Manifest, ref: BlockRef) -> None:
    now_s = node.clock.monotonic_s()
    key = record.tenant, record.agent
    adoption = node.adopted.setdefault(migration, Adoption(key, now_s))
    adoption.refs.append(ref)
    adoption.at_s = now_s


def _fetch(
    node: "Node", call: CopyBlocks, record: Manifest, arrived: Callable[[BlockRef], None]
) -> Copied:
    """Runs on a fetch thread, and so tells the loop what has arrived."""
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
        arrived(ref)
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
        encrypt_links=node.config.settings.encrypt_links,
    )
    return Copied(
        blocks_sent=report.blocks,
        blocks_reused=len(by_name) - len(missing),
        bytes_sent=report.bytes,
        seconds=node.clock.monotonic_s() - began,
    )


async def _forget_if_aborted(node: "Node", migration: MigrationId, record: Manifest) -> None:
    """Let go of what came after a move was given up, or its agent erased: it is in nobody's way."""
    key = record.tenant, record.agent
    if migration in node.aborted or record.epoch <= node.erased.floor(*key):
        await forget(node, migration, key)


async def forget(node: "Node", migration: MigrationId, key: AgentKey) -> None:
    """Let go of a migration that came to nothing, and refuse to commit it later.

    Raises DiskError with the code UNDECIDED where its record may be the one that is stored.
    """
    async with node.deciding(key):  # a commit under way ends first: who asks then is told of it
        await _forget(node, migration)
        await _undo(node, migration, key)


async def _forget(node: "Node", migration: MigrationId) -> None:
    node.aborted[migration] = None
    while len(node.aborted) > ABORTED_MAX:
        node.aborted.popitem(last=False)
    node.arrivals.drop(migration)
    node.engine.moving.go_on(migration)
    node.landings.note(migration)
    await let_go(node, migration, ())


async def _undo(node: "Node", migration: MigrationId, key: AgentKey) -> None:
    """Make sure that no restart finds the record of a commit that failed."""
    doubted = node.store.doubted(*key)
    if doubted is None or (doubted.migration, doubted.state) != (migration, OwnerState.OWNED):
        return
    if not await node.in_worker(lambda: node.store.settle(*key)):
        message = "nobody can say whether the move was committed: the disk refuses to tell"
        failure = DiskError(message)
        failure.code = UNDECIDED
        raise failure


async def let_go(node: "Node", migration: MigrationId, kept: Iterable[BlockRef]) -> None:
    """Take back the pins of what a migration brought, but for those its record has taken."""
    adoption = node.adopted.pop(migration, None)
    pins = Counter(adoption.refs if adoption is not None else ())
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
    stale = [(m, a.key) for m, a in node.adopted.items() if now_s - a.at_s >= idle_s]
    for migration, key in stale:
        try:
            await forget(node, migration, key)
        except DiskError as error:
            _log.error("a move stays in doubt: %s", error.message)
    return len(stale)


async def commit(node: "Node", call: CommitMigration) -> Committed:
    """Fetch what is missing and own the agent at `call.epoch`. Repeatable.

    One call, as a client waits for its next token meanwhile. Its durable publish is the commit.
    """
    record = _checked(node, call.offer.manifest)
    copied = NOTHING_COPIED
    if _committed(node, call, record) is None:
        tail = CopyBlocks(call.migration, call.source, call.offer, Urgency.MIGRATION_TAIL)
        if call.migration in node.arrivals:  # copied while a stream of it ran
            node.engine.moving.fall_silent(call.migration)
        try:
            copied = await _copy(node, tail, record)
        finally:
            await _forget_if_aborted(node, call.migration, record)
    try:
        view = await _decide(node, call, record)
    finally:
        node.landings.note(call.migration)
    return Committed(view, copied)


async def _decide(node: "Node", call: CommitMigration, record: Manifest) -> AgentView:
    key = record.tenant, record.agent
    async with node.deciding(key):
        agent = node.table.get(key)
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
    except Exception:  # noqa: BLE001 - the commit that waits for this is durable perhaps
        _log.exception("the end of an agent on its way in was not loaded")


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
        provenance=replace(record.provenance, served=node.service_time.stamp()),
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

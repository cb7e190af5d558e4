"""Copies of an agent beside it: replicas that stand by, and forks that go ways of their own.

Both are made of the owner's last saved record. Blocks are shared with it on the same node, and
fetched as for a move on another; nothing of the agent itself changes.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.control.copy_calls import KeepFork, KeepReplica, OfferCopy
from fabric.control.node_calls import AgentView, Offer
from fabric.errors import (
    ConflictError,
    CorruptDataError,
    OverloadedError,
    RetryLaterError,
    StaleEpochError,
)
from fabric.ids import MigrationId
from fabric.limits import AGENTS_PER_NODE_MAX
from fabric.record.manifest import (
    Manifest,
    OwnerState,
    decode_manifest,
    encode_manifest,
)
from fabric.record.rekey import owned_anew
from fabric.record.restore_plan import essential
from node.agents.agent import Agent
from node.migration.source import OFFER_VALID_S
from node.migration.target import let_go
from node.tiers.disk_tier import record_bytes
from node.tiers.record_mending import whole

if TYPE_CHECKING:
    from node.node import Node


async def offer_copy(node: "Node", call: OfferCopy) -> Offer:
    """Offer the agent's last saved record, whatever runs meanwhile."""
    agent = node.table.require((call.tenant, call.agent))
    if agent.manifest.epoch != call.epoch:
        message = f"the agent is at epoch {agent.manifest.epoch}, not {call.epoch}"
        raise StaleEpochError(message)
    if agent.manifest.state is OwnerState.SEALED:
        message = "the agent is being moved to another node"
        raise RetryLaterError(message, code="agent_moving")
    if agent.manifest.state is not OwnerState.OWNED:
        message = f"the agent is {agent.manifest.state} here"
        raise ConflictError(message, code="not_owner")
    await whole(node, agent, verify=call.verify)
    record = agent.saved
    if record is None or not record.token_ids:
        if agent.is_busy:
            message = "the agent's first turn has not ended yet"
            raise RetryLaterError(message, code="nothing_saved")
        message = "nothing of the agent is on disk"
        raise ConflictError(message, code="nothing_saved")
    refs = list(dict.fromkeys(record.refs))
    ticket = node.transfers.offer(
        call.migration, call.tenant, call.agent, call.target, call.epoch, refs, OFFER_VALID_S
    )
    # The record on disk may be of an earlier epoch, until a turn has ended in this one.
    raw = encode_manifest(replace(record, epoch=call.epoch, owner=node.name))
    return Offer(raw, ticket, node.addresses())


# --- replicas --------------------------------------------------------------------------------


async def keep_replica(node: "Node", call: KeepReplica) -> AgentView:
    """Publish the record as a replica; repeatable, and never in place of something later."""
    offered = essential(await _decoded(node, call.manifest), node.spec.window_tokens)
    # A commit may make this node the owner.
    async with node.deciding((offered.tenant, offered.agent)):
        return await _keep_replica(node, call, offered)


async def _keep_replica(node: "Node", call: KeepReplica, offered: Manifest) -> AgentView:
    agent = node.table.get((offered.tenant, offered.agent))
    if agent is not None:
        _check_replaceable(agent, offered)
    else:
        _require_place(node)
    previous = agent.saved if agent is not None else None
    record = _replica(offered, call, previous)
    if previous is not None and replace(record, revision=previous.revision) == previous:
        await let_go(node, call.migration, ())
        assert agent is not None, "whose record it is"
        return agent.view()
    agent = agent or Agent(record)
    await _publish(node, agent, record, call.migration)
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
    known = agent.manifest
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


# --- forks -----------------------------------------------------------------------------------


async def keep_fork(node: "Node", call: KeepFork) -> AgentView:
    """Own a new agent with the record's memory; repeatable until its first turn."""
    offered = await _decoded(node, call.manifest)
    key = (offered.tenant, call.agent)
    known = node.table.get(key)
    if known is not None and known.manifest.migration == MigrationId(call.operation):
        return known.view()
    _refuse_fork(node, known)
    if node.store.missing(offered):  # it was copied: older windows and states stay where they are
        offered = essential(offered, node.spec.window_tokens)
    wall_s = node.clock.wall_s()
    epoch = node.erased.claim_epoch(*key, call.epoch)
    anew = owned_anew(offered, key, node.name, epoch, wall_s)
    record = replace(
        anew,
        group=None,
        sketch=(),  # it is nobody's conversation until it has had a turn
        created_s=wall_s,
        migration=MigrationId(call.operation),  # by which a repeated call is recognised
        provenance=replace(anew.provenance, is_fork=True, served=node.service_time.stamp()),
    )
    await node.reclaim.make_place(record.tenant)
    _require_place(node)
    _refuse_fork(node, node.table.get(key))
    agent = Agent(record)
    agent.came_from_peer = offered.owner != node.name
    await _publish(node, agent, record, call.migration)
    return agent.view()


def _refuse_fork(node: "Node", known: Agent | None) -> None:
    if known is not None:
        message = f"an agent is called {known.manifest.agent!r} already"
        raise ConflictError(message, code="agent_exists")
    node.refuse_new()
    if not node.reuses:
        message = f"{node.name} keeps no memory of agents: {node.problem}"
        raise ConflictError(message, code="no_reuse")


# --- both ------------------------------------------------------------------------------------


async def _decoded(node: "Node", raw: bytes) -> Manifest:
    """Check a record as one from outside: nothing but its tokens names its blocks."""
    record = decode_manifest(raw)
    if record.fingerprint != node.fingerprint:
        message = f"{node.name} runs another model than this agent's"
        raise ConflictError(message, code="fingerprint_mismatch")
    await node.in_worker(lambda: node.store.named_refs(record))
    return record


def _require_place(node: "Node") -> None:
    if len(node.table) >= AGENTS_PER_NODE_MAX:
        message = f"this node already holds {AGENTS_PER_NODE_MAX} agents"
        raise OverloadedError(message)


async def _publish(node: "Node", agent: Agent, record: Manifest, migration: MigrationId) -> None:
    """Make `record` the agent's; turns of it wait, and a failure leaves all as it was."""
    if migration in node.aborted:
        message = "this copy was aborted"
        raise ConflictError(message, code="aborted")
    previous, is_new = agent.saved, node.table.get(agent.key) is None
    if is_new:
        node.table.put(agent)
    async with agent.turn_lock:
        try:
            await _store(node, record, previous)
        except BaseException:
            if is_new:
                agent.was_evicted = True  # turns that wait for it begin anew
                node.table.forget(agent)
            raise
        agent.manifest = agent.saved = record
        agent.is_durable, agent.cache, agent.stored_tokens = True, None, 0
        agent.named = ((), ())
        agent.came_from_peer = agent.came_from_peer or record.state is OwnerState.REPLICA
        node.table.put(agent)
    node.note_hot()
    await let_go(node, migration, record.refs)  # the record holds its blocks now


async def _store(node: "Node", record: Manifest, previous: Manifest | None) -> None:
    spare = record.state is OwnerState.REPLICA
    await node.reclaim.make_room(record.tenant, record_bytes(record), spare_only=spare)
    missing = await node.in_worker(lambda: node.store.missing(record))
    if missing:
        message = f"{len(missing)} of the agent's blocks are not here"
        raise ConflictError(message, code="blocks_missing")
    try:
        await node.in_worker(lambda: node.store.publish(record, previous))
    except CorruptDataError:
        message = "blocks of the agent went while it was copied"
        raise ConflictError(message, code="blocks_missing") from None

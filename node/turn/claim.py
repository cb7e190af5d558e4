"""Whose turn it is: resolve the identity, wait in line, and prove ownership."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fabric.errors import (
    FabricError,
    OverloadedError,
    RetryElsewhereError,
    RetryLaterError,
    StaleEpochError,
)
from fabric.ids import AgentKey, MigrationId
from fabric.record.manifest import OwnerState
from fabric.turn.generation import GenerateRequest, IdentityKind
from node.agents.agent import Agent, HandedOn

if TYPE_CHECKING:
    from node.node import Node

DECISION_WAIT_S = 30.0  # a turn that meets a migration waits this long for its outcome
TURNS_WAITING_MAX = 16  # per agent
TAKE_UP_WAIT_S = 5.0  # for an answer that its router asks for again at once


@contextlib.asynccontextmanager
async def claimed(node: "Node", request: GenerateRequest, text: str) -> AsyncIterator[Agent]:
    """Hold the agent of this request; nobody else runs a turn of it meanwhile."""
    if request.after is not None:
        await _land(node, request, request.after)
    while True:
        agent = await _lock(node, request, text)
        try:
            await _own(node, agent, request.epoch, request.erased_epoch)
            before = agent.handed_on
            if request.resume is not None or not before or before.epoch != agent.manifest.epoch:
                agent.take_up()
                yield agent
                return
        finally:
            agent.turn_lock.release()
            if not agent.manifest.token_ids and not agent.is_busy:
                node.table.forget(agent)  # it never got to remember anything
            node.table.cool(node.settings.hot_bytes)
            node.note_hot()
        await _let_go_on(agent, before)


async def _let_go_on(agent: Agent, before: HandedOn) -> None:
    """Wait until an answer of which its client has read a part is taken up again."""
    agent.waiting_count += 1
    try:
        await asyncio.wait_for(before.taken_up.wait(), TAKE_UP_WAIT_S)
    except TimeoutError:  # its client went away in that moment
        if agent.handed_on is before:
            agent.take_up()
    finally:
        agent.waiting_count -= 1


async def _land(node: "Node", request: GenerateRequest, migration: MigrationId) -> None:
    """Wait for the move that brings the agent here; raise RetryElsewhereError if it does not."""
    assert request.identity.agent is not None, "only a named agent moves"
    key = request.tenant, request.identity.agent
    if not _is_owned(node, key, request.epoch) and migration not in node.aborted:
        node.engine.moving.fall_silent(migration)
        await node.landings.wait(migration)
    if not _is_owned(node, key, request.epoch):
        message = "the agent's move to this node came to nothing"
        raise RetryElsewhereError(message)


def _is_owned(node: "Node", key: AgentKey, epoch: int) -> bool:
    agent = node.table.get(key)
    if agent is None:
        return False
    record = agent.manifest
    return record.state is not OwnerState.REPLICA and record.epoch >= epoch


async def _lock(node: "Node", request: GenerateRequest, text: str) -> Agent:
    """Wait for the agent's turn; one that was evicted meanwhile begins anew."""
    for _ in range(TURNS_WAITING_MAX):
        with contextlib.suppress(FabricError):  # without room, a new agent is refused below
            await node.reclaim.make_place(request.tenant)
        agent = _resolve(node, request, text)
        if agent.waiting_count >= TURNS_WAITING_MAX and request.resume is None:
            break
        agent.waiting_count += 1
        try:
            await agent.turn_lock.acquire()
        finally:
            agent.waiting_count -= 1
        if not agent.was_evicted:
            return agent
        agent.turn_lock.release()
    message = f"{TURNS_WAITING_MAX} turns already wait for this agent"
    raise OverloadedError(message)


def _resolve(node: "Node", request: GenerateRequest, text: str) -> Agent:
    table, identity = node.table, request.identity
    if identity.kind is IdentityKind.AGENT:
        assert identity.agent is not None, "an AGENT identity names its agent"
        known = table.get((request.tenant, identity.agent))
        if known is None:
            node.refuse_new()
            epoch = node.erased.claim_epoch(request.tenant, identity.agent, request.epoch)
            known = table.create(request.tenant, identity.agent, None, epoch)
        return known
    recognised = table.recognise(request.tenant, identity, text.encode())
    if recognised is not None and not _is_erased(node, recognised):
        return recognised
    node.refuse_new()
    group = identity.agent if identity.kind is IdentityKind.GROUP else None
    name = table.name_new(request.tenant, identity)
    epoch = node.erased.claim_epoch(request.tenant, name, request.epoch)
    return table.create(request.tenant, name, group, epoch)


def _is_erased(node: "Node", agent: Agent, told_epoch: int = 0) -> bool:
    """Say whether an agent was erased, as far as this node or who sends the turn has heard."""
    return agent.manifest.epoch <= max(told_epoch, node.erased.floor(*agent.key))


async def _own(node: "Node", agent: Agent, asked: int, erased_epoch: int) -> None:
    """Raise unless this node may serve the agent at the epoch the directory asked for."""
    try:
        await asyncio.wait_for(agent.decided.wait(), DECISION_WAIT_S)
    except TimeoutError:
        message = "the agent is being moved"
        raise RetryLaterError(message, code="migrating") from None
    if node.table.get(agent.key) is not agent:
        message = "the agent was erased while this turn waited"
        raise RetryLaterError(message, code="erased")
    record = agent.manifest
    if _is_erased(node, agent, erased_epoch):
        message = "the agent is being erased"
        raise RetryLaterError(message, code="erased")
    if (asked or record.epoch) < agent.fence:  # 0: found by its content, whatever its epoch
        message = f"another node owns the agent at epoch {agent.fence}"
        raise StaleEpochError(message)
    if record.state is OwnerState.REPLICA and asked <= record.epoch:
        message = f"the agent is owned by {record.owner} at epoch {record.epoch}"
        raise RetryElsewhereError(message)
    if 0 < asked < record.epoch:
        message = f"epoch {asked} was superseded by {record.epoch}"
        raise StaleEpochError(message)
    if asked > record.epoch:  # the directory made this node the owner
        agent.manifest = replace(record, epoch=asked, owner=node.name, state=OwnerState.OWNED)
        node.table.put(agent)

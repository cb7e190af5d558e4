"""Answer the router's control calls on the node's event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fabric.control import (
    AbortMigration,
    AgentList,
    AgentSketch,
    CommitMigration,
    CopyBlocks,
    Describe,
    Done,
    EraseAgent,
    Flush,
    ListAgents,
    OfferMigration,
    PinAgent,
    ReleaseAgent,
    SealAgent,
    ShareErasures,
    Stop,
    decode_call,
    encode_reply,
)
from fabric.copy_calls import DrainNode, KeepFork, KeepReplica, OfferCopy, PrefetchAgent
from fabric.errors import FabricError, RejectedError
from fabric.links import MeetPeers
from node import copies, draining, eviction, migration_source, migration_target, pins
from node.http_server import error_reply
from node.node import Node

_ELSEWHERE = RejectedError("this call does not travel over HTTP", code="unknown_call")
_LIMIT_S = 3600.0  # a copy may take long; the caller has its own, shorter limit
_log = logging.getLogger(__name__)


class ControlCalls:
    """The table from message type to what is done about it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._answers: dict[type, Callable[[Any], Awaitable[object]]] = {
            Describe: self._describe,
            ListAgents: self._list_agents,
            EraseAgent: lambda call: eviction.erase(node, call),
            ShareErasures: lambda call: eviction.take_erasures(node, call),
            PinAgent: lambda call: pins.pin(node, call),
            OfferMigration: lambda call: migration_source.offer(node, call),
            SealAgent: lambda call: migration_source.seal(node, call),
            ReleaseAgent: lambda call: migration_source.release(node, call),
            AbortMigration: self._abort,
            CopyBlocks: lambda call: migration_target.copy_blocks(node, call),
            CommitMigration: lambda call: migration_target.commit(node, call),
            OfferCopy: self._offer_copy,
            KeepReplica: lambda call: copies.keep_replica(node, call),
            KeepFork: lambda call: copies.keep_fork(node, call),
            PrefetchAgent: node.prefetches.answer,
            DrainNode: lambda call: draining.drain(node, call),
            MeetPeers: self._meet,
            Flush: self._flush,
            Stop: self._stop,
        }

    async def answer(self, raw: bytes, among: tuple[type, ...] = ()) -> bytes:
        """Decode, carry out and answer one call, if it is `among` these; errors go back as data."""
        try:
            _, call = decode_call(raw)
            if among and not isinstance(call, among):
                return encode_reply(error_reply(_ELSEWHERE))
            async with asyncio.timeout(_LIMIT_S):
                return encode_reply(await self._answers[type(call)](call))
        except FabricError as error:
            return encode_reply(error_reply(error))
        except Exception as error:  # noqa: BLE001 - nothing may end the loop
            _log.exception("a control call failed")
            message = f"the node failed on this call ({type(error).__name__})"
            return encode_reply(error_reply(FabricError(message)))

    async def _describe(self, _: Describe) -> object:
        return self._node.view()

    async def _list_agents(self, _: ListAgents) -> AgentList:
        node = self._node
        agents = tuple(AgentSketch(a.view(), a.manifest.sketch) for a in node.table)
        return AgentList(node.name, node.config.incarnation, node.table.changes, agents)

    async def _offer_copy(self, call: OfferCopy) -> object:
        return copies.offer_copy(self._node, call)

    async def _abort(self, call: AbortMigration) -> Done:
        await migration_target.forget(self._node, call.migration)
        return await migration_source.take_back(self._node, call)

    async def _meet(self, call: MeetPeers) -> Done:
        peers = [peer for peer in call.peers if peer.name != self._node.name]
        self._node.links.meet(peers)
        return Done()

    async def _flush(self, call: Flush) -> Done:
        node = self._node
        await node.quiesce()
        left = await node.flusher.flush()
        if call.drop_hot:
            node.table.cool(0)
            node.note_hot()
        return Done(_saved_note(node, left))

    async def _stop(self, _: Stop) -> Done:
        self._node.is_draining = self._node.is_stopping = True
        for turn in list(self._node.turns):
            turn.cancel()
        await self._node.quiesce()
        return Done(_saved_note(self._node, await self._node.flusher.flush()))


def _saved_note(node: Node, left: int) -> str:
    if left:
        return f"{left} agents are in memory only: {node.degraded}"
    return node.degraded or f"{len(node.table)} agents are durable"

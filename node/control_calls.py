"""Control calls of the router, answered on the node's event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from fabric.control.calls import (
    CallOrigin,
    CallRoute,
    ErrorReply,
    decode_call,
    encode_reply,
    spec_of,
)
from fabric.control.change_calls import DescribeChanges, ListChanges
from fabric.control.directive_calls import ChangeSettings, DirectAgent, ReadMemory
from fabric.control.erasure_calls import EraseAgent, ShareErasures
from fabric.control.head_calls import OfferHead
from fabric.control.node_calls import (
    AbortMigration,
    CommitMigration,
    CopyBlocks,
    Describe,
    Done,
    DrainNode,
    DropResident,
    Flush,
    ListAgents,
    OfferMigration,
    PinAgent,
    PrefetchAgent,
    ReleaseAgent,
    Restart,
    SealAgent,
    Stop,
)
from fabric.control.replica_calls import DropReplica, KeepFork, KeepReplica, OfferCopy, TakeOver
from fabric.control.span_calls import OfferSpans, ReturnSpans, TakeSpan
from fabric.control.term_calls import GrantTerm
from fabric.control.turn_calls import ReadTurns, TurnsView
from fabric.errors import FabricError, OverloadedError, RejectedError, UnauthorizedError
from fabric.fair_share import FairShare
from fabric.hosting.tracing import span
from fabric.hosting.turn_context import about_trace, about_turn
from fabric.ids import NodeName
from fabric.limits import FLUSH_WAIT_S, STOP_WAIT_S_MAX
from fabric.net.links import PeerList
from fabric.record.turn_history import read_turns
from node.agents.agent_listing import list_agents, list_changes
from node.http.routes import error_reply
from node.limits import NODE_STOP_WAIT_S, WAITING_CALLS_MAX
from node.node import Node
from node.runtime.workers import low_latency
from node.view_history import ViewHistory

_WRONG_ROUTE = RejectedError("this call is not accepted on this route", code="unknown_call")
_WRONG_TARGET = UnauthorizedError("a node may name only itself as the target", code="bad_key")
_LIMIT_S = 3600.0  # a copy may take long; the caller has its own, shorter limit
_log = logging.getLogger(__name__)


class ControlCalls:
    """Table of control calls by message type."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._terms = node.terms
        self._waiting = FairShare[str](WAITING_CALLS_MAX)
        self._views = ViewHistory()
        self._answers: dict[type, Callable[[Any], Awaitable[object]]] = {
            Describe: self._describe,
            ListAgents: self._list_agents,
            DescribeChanges: self._describe_changes,
            ListChanges: self._list_changes,
            EraseAgent: node.commands.erasing.erase,
            ShareErasures: node.commands.erasing.take,
            PinAgent: node.commands.pinning.pin,
            DirectAgent: node.commands.directive_store.change_directives,
            ChangeSettings: node.commands.directive_store.change_settings,
            ReadMemory: node.commands.directive_store.read_memory,
            ReadTurns: self._read_turns,
            DropResident: node.commands.directive_store.drop_resident,
            DropReplica: node.commands.directive_store.drop_replica,
            OfferMigration: node.moves.source.offer,
            SealAgent: node.moves.source.seal,
            ReleaseAgent: node.moves.source.release,
            AbortMigration: self._abort,
            CopyBlocks: node.moves.copies.copy_blocks,
            CommitMigration: node.moves.target.commit,
            OfferCopy: node.moves.copy_source.offer,
            KeepReplica: node.moves.replicas.keep,
            KeepFork: node.moves.forks.keep,
            TakeOver: node.moves.takeovers.take_over,
            OfferSpans: node.moves.prefix_source.offer,
            TakeSpan: node.moves.prefix_target.take,
            ReturnSpans: node.moves.prefix_target.give_back,
            OfferHead: node.lenders.offer,
            PrefetchAgent: node.tiers.prefetches.answer,
            DrainNode: node.background.drain_flag.drain,
            PeerList: self._set_peers,
            Flush: self._flush,
            Stop: self._stop,
            Restart: self._restart,
            GrantTerm: node.terms.grant,
        }

    @property
    def answered(self) -> frozenset[type]:
        return frozenset(self._answers)

    async def answer(
        self, raw: bytes, came_by: CallRoute = CallRoute.ACTOR, peer: NodeName | None = None
    ) -> bytes:
        """Decode, execute and answer one call; return errors as data, also for a wrong route.

        `peer` is the authenticated node that made it.
        """
        try:
            call, origin = decode_call(raw)
        except FabricError as error:
            return encode_reply(error_reply(error))
        with about_turn(origin.turn), about_trace(origin.trace):
            return encode_reply(await self._answer_traced(call, origin, came_by, peer))

    async def _answer_traced(
        self, call: object, origin: CallOrigin, came_by: CallRoute, peer: NodeName | None
    ) -> object:
        if origin.trace is None:  # a heartbeat, or a call of a turn without a span
            return await self._answer(call, origin, came_by, peer)
        with span(spec_of(type(call)).name, node=self._node.name) as call_span:
            answer = await self._answer(call, origin, came_by, peer)
            if isinstance(answer, ErrorReply):
                call_span.end(answer.code)
            return answer

    async def _answer(
        self, call: object, origin: CallOrigin, came_by: CallRoute, peer: NodeName | None
    ) -> object:
        try:
            spec = spec_of(type(call))
            if not _is_accepted(spec.route, came_by):
                return error_reply(_WRONG_ROUTE)
            if isinstance(call, OfferHead) and call.target != peer:
                return error_reply(_WRONG_TARGET)
            if not spec.is_open:
                await self._terms.admit(origin.term)
            is_waited_for = spec.route is CallRoute.HTTP
            async with asyncio.timeout(_LIMIT_S):
                with low_latency() if is_waited_for else nullcontext():
                    return await self._execute(call)
        except FabricError as error:
            return error_reply(error)
        except Exception as error:  # noqa: BLE001 - the caller gets every error as data
            _log.exception("a control call failed")
            message = f"internal error of the node ({type(error).__name__}); see the node's log"
            return error_reply(FabricError(message))

    async def _execute(self, call: Any) -> object:
        answer = self._answers[type(call)]
        if not spec_of(type(call)).waits:
            return await answer(call)
        if not self._waiting.take(call.tenant):
            message = "too many calls of this tenant are waiting on this node; retry later"
            raise OverloadedError(message)
        try:
            return await answer(call)
        finally:
            self._waiting.give(call.tenant)

    async def _describe(self, _: Describe) -> object:
        view = self._node.view(self._node.links.views())
        self._node.background.sleep.note_report(view.state)
        return view

    async def _describe_changes(self, call: DescribeChanges) -> object:
        view = self._node.view()
        self._node.background.sleep.note_report(view.state)
        is_known = call.incarnation == view.incarnation and call.view
        links = self._node.links.changes_after(call.links if is_known else 0)
        return self._views.changes(call, view, links)

    async def _list_changes(self, call: ListChanges) -> object:
        node = self._node
        config = node.resources.identity.config
        return list_changes(config.name, config.incarnation, node.resources.table, call)

    async def _list_agents(self, call: ListAgents) -> object:
        node = self._node
        config = node.resources.identity.config
        return list_agents(config.name, config.incarnation, node.resources.table, call)

    async def _read_turns(self, call: ReadTurns) -> TurnsView:
        """List an agent's last turns; raises the errors of `OwnedAgents.require`."""
        record = self._node.tiers.owned.require(call.key).manifest
        return TurnsView(read_turns(record.provenance.turns))

    async def _abort(self, call: AbortMigration) -> Done:
        await self._node.moves.cleanup.abort(call.migration, call.key)
        return await self._node.moves.source.take_back(call)

    async def _set_peers(self, call: PeerList) -> Done:
        peers = [peer for peer in call.peers if peer.name != self._node.resources.identity.name]
        self._node.links.set_peers(peers)
        return Done()

    async def _flush(self, call: Flush) -> Done:
        node = self._node
        running = await node.live_turns.quiesce(FLUSH_WAIT_S)
        await node.background.folders.ensure_folders()
        unsaved_count = await node.tiers.flusher.flush()
        if call.drop_hot:
            node.tiers.hot.drop_resident(0)
        note = _saved_note(node, unsaved_count)
        return Done(f"{note}; {running} turns still run" if running else note)

    async def _stop(self, _: Stop) -> Done:
        return await self._end_turns(NODE_STOP_WAIT_S)

    async def _restart(self, call: Restart) -> Done:
        return await self._end_turns(min(call.wait_s, STOP_WAIT_S_MAX))

    async def _end_turns(self, wait_s: float) -> Done:
        """Give running turns `wait_s` to end, cancel the rest, and save all agents."""
        await self._node.live_turns.end(wait_s)
        await self._node.background.folders.ensure_folders()
        return Done(_saved_note(self._node, await self._node.tiers.flusher.flush()))


def _is_accepted(route: CallRoute, came_by: CallRoute) -> bool:
    """Return whether a route accepts a call; Ray's actor accepts all calls of the router."""
    if came_by is CallRoute.ACTOR:
        return route is not CallRoute.PEER
    return came_by is route


def _saved_note(node: Node, unsaved_count: int) -> str:
    if unsaved_count:
        return f"{unsaved_count} agents are in memory only: {node.health.degraded}"
    return node.health.degraded or f"{len(node.resources.table)} agents are durable"

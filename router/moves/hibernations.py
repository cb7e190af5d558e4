"""Hibernation of agents: the owner writes one to a file, and a node with the same model resumes it.

The router relays the bytes as they arrive; a node verifies, signs and stores them.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fabric.codec import from_plain, parse_json
from fabric.control.hibernation_calls import (
    CALL_HEADER,
    HIBERNATE_PATH,
    MEDIA_TYPE,
    RESUME_PATH,
    Hibernate,
    Resume,
    Resumed,
    encode_header,
)
from fabric.control.node_calls import Done, NodeView, ReleaseAgent
from fabric.control.versions import BAD_NODE_ANSWER
from fabric.errors import (
    UNDECIDED,
    ConflictError,
    FabricError,
    RejectedError,
    RetryElsewhereError,
    RetryLaterError,
)
from fabric.ids import AgentKey, NodeName
from fabric.limits import FRAME_BYTES_MAX
from fabric.record.hibernation_file import HibernationHeader
from fabric.record.manifest import OwnerState
from router.events import AgentHibernated, AgentResumed
from router.fleet.directory import Holding, StartReservation
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.fresh_ids import fresh_migration
from router.limits import QUOTED_NAME_CHARS_MAX
from router.moves.move_registry import MoveRegistry
from router.moves.retries import with_fresh_owner

_LOG = logging.getLogger("macfabric.router.hibernations")
PASS_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class ResumeOptions:
    """Client's options for resuming an agent from a file."""

    key: AgentKey
    node: str | None = None
    replace: bool = False
    signing_key: bytes | None = field(default=None, repr=False)


class Upload:
    """Body of a client on its way to a node, with the error that ended it early."""

    def __init__(self, lead: bytes, rest: AsyncIterator[bytes]) -> None:
        self._lead = lead
        self._rest = rest
        self.failure: Exception | None = None

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the part of the body that was read already, then the rest as it arrives."""
        yield self._lead
        try:
            async for part in self._rest:
                if part:
                    yield part
        except Exception as error:
            # The HTTP client would report its own broken connection instead.
            self.failure = error
            raise


class Hibernations:
    """Hibernation and resumption of agents, and the directory entries that they change."""

    def __init__(self, fleet: Fleet, moves: MoveRegistry) -> None:
        self._fleet = fleet
        self._moves = moves

    async def hibernate(
        self, key: AgentKey, signing_key: bytes | None, salt: bytes
    ) -> tuple[NodeName, aiohttp.ClientResponse]:
        """Return the owner and its response, whose body is the agent's file."""
        return await with_fresh_owner(
            self._fleet, lambda: self._attempt(key, signing_key, salt), relist=True
        )

    async def resume(
        self, options: ResumeOptions, header: HibernationHeader, upload: Upload
    ) -> Resumed:
        """Resume an agent from a file; raise ConflictError if it exists or no node fits."""
        key = options.key
        await self._fleet.membership.refresh(relist=True)
        owner = self._check_free(options)
        node = self._choose(options, header, owner)
        epoch = max(self._fleet.begin_epoch(key), header.epoch + 1)
        # Keeps a first turn under this name from starting another agent meanwhile.
        reservation = None
        if owner is None:
            reservation = self._fleet.directory.reserve(key, node.name, epoch)
            reservation.turns_count += 1
        try:
            call = Resume(*key, epoch, options.replace, options.signing_key)
            resumed = await self._send(node.name, call, upload)
        except FabricError as error:
            if error.code == UNDECIDED:
                await self._release_owner(key, owner, epoch)
            raise
        finally:
            if reservation is not None:
                self._fleet.directory.release(key, reservation)
        _LOG.info("an agent was resumed on %s", node.name)
        await self._record_owner(key, node.name, resumed.view.epoch)
        return resumed

    async def _release_owner(self, key: AgentKey, owner: Holding | None, epoch: int) -> None:
        """Make the owner release the agent, as the other node may own it after a restart.

        If the call is lost, further turns use an epoch above the released one.
        """
        self._fleet.directory.issue(key, epoch)
        if owner is not None:
            call = ReleaseAgent(*key, epoch, fresh_migration(), owner.node)
            with suppress(FabricError):  # otherwise the higher claim wins, if it turns up
                await self._fleet.link(owner.node).call(call, Done)
            self._fleet.membership.nudge(owner.node)

    async def _attempt(
        self, key: AgentKey, signing_key: bytes | None, salt: bytes
    ) -> tuple[NodeName, aiohttp.ClientResponse]:
        await self._fleet.membership.refresh()
        owner = self._fleet.require_owner(key)
        self._moves.require_not_moving(key)
        call = Hibernate(*key, owner.epoch, signing_key, salt)
        headers = {CALL_HEADER: encode_header(call)}
        answer = await self._fleet.link(owner.node).post(HIBERNATE_PATH, b"", headers)
        self._fleet.events.publish(AgentHibernated(key, owner.node))
        return owner.node, answer

    def _check_free(self, options: ResumeOptions) -> Holding | None:
        """Return the agent to replace, if any; raise ConflictError if it must not be replaced.

        Raises RetryLaterError while an awaited node may have such an agent.
        """
        self._moves.require_not_moving(options.key)
        directory = self._fleet.directory
        owner = directory.owner(options.key) or directory.released_owner(options.key)
        started: StartReservation | None = directory.reservation(options.key)
        if started is not None or (owner is not None and not options.replace):
            message = f"agent {options.key[1]!r} exists already: replace it, or choose another name"
            raise ConflictError(message, code="agent_exists")
        if owner is None and not options.replace:
            self._fleet.discovery.require_reports(options.key[1])
        return owner

    def _choose(
        self, options: ResumeOptions, header: HibernationHeader, owner: Holding | None
    ) -> NodeView:
        """Return the requested node, or the least busy one that runs the file's model."""
        ready = self._fleet.ready()
        fitting = [view for view in ready if view.fingerprint == header.fingerprint.hex()]
        if options.node is not None:
            name = self._fleet.require_node(options.node, param="node")
            ready = [view for view in ready if view.name == name]
            fitting = [view for view in fitting if view.name == name]
        if not ready:
            message = "no such node is ready" if options.node else "no node is ready yet"
            raise RetryLaterError(message, retry_after_s=2.0, code="no_node_ready")
        if not fitting:
            models = ", ".join(sorted({view.model for view in ready}))
            message = (
                f"the file is for the model {header.model[:QUOTED_NAME_CHARS_MAX]!r} (fingerprint "
                f"{header.fingerprint.hex()[:16]}), which no ready node runs; models here: {models}"
            )
            raise ConflictError(message, code="fingerprint_mismatch")
        home = owner.node if owner is not None else None
        return min(fitting, key=lambda v: (v.name != home, v.queue_s, v.tokens, v.name))

    async def _send(self, node: NodeName, call: Resume, upload: Upload) -> Resumed:
        headers = {CALL_HEADER: encode_header(call), "content-type": MEDIA_TYPE}
        try:
            response = await self._fleet.link(node).post(RESUME_PATH, upload.parts(), headers)
            async with response:
                raw = await response.content.read(FRAME_BYTES_MAX)
        except (FabricError, aiohttp.ClientError, OSError) as error:
            if upload.failure is not None:
                raise upload.failure from None
            if isinstance(error, RetryElsewhereError):
                message = f"node {node} did not accept the file: {error.message}"
                raise RetryLaterError(message, retry_after_s=2.0, code=error.code) from None
            if isinstance(error, FabricError):
                raise
            message = f"the connection to {node} broke ({type(error).__name__})"
            raise RetryLaterError(message, code=NodeLostError.code) from None
        return _decode_resumed(raw, node)

    async def _record_owner(self, key: AgentKey, node: NodeName, epoch: int) -> None:
        """Record the new owner, and have earlier holders release the agent."""
        holdings = [h for h in self._fleet.directory.unerased_holdings(key) if h.node != node]
        self._fleet.note_holding(key, node, epoch, OwnerState.OWNED)
        self._fleet.events.publish(AgentResumed(key, node))
        for holding in holdings:
            call = ReleaseAgent(*key, epoch, fresh_migration(), node)
            # If the call is lost, recovery finds two claims and repeats it.
            with suppress(FabricError):
                await self._fleet.link(holding.node).call(call, Done)
                self._fleet.note_holding(key, holding.node, epoch, OwnerState.REPLICA)
        self._fleet.membership.nudge(node)


def _decode_resumed(raw: bytes, node: NodeName) -> Resumed:
    try:
        plain: Any = parse_json(raw)
        resumed: Resumed = from_plain(Resumed, plain, "resumed")
    except RejectedError as error:
        message = f"{node} sent an invalid reply to a resume: {error.message}"
        raise FabricError(message, code=BAD_NODE_ANSWER) from None
    return resumed

"""Requests about an agent whose node is lost: a replica takes over, or they are refused.

    lease not expired           refused: try again when it is
    node is starting again      refused: try again, the node brings the agent back
    a current replica           its node becomes the owner, and the request continues there
    none, or an older one       refused until the node returns, or a turn starts the agent elsewhere

A turn carries its messages, so it may start from nothing. A request that only names an agent must
not, as it would silently apply to another memory.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fabric.control.node_calls import AgentView
from fabric.control.replica_calls import TakeOver
from fabric.errors import FabricError, RetryLaterError
from fabric.ids import AgentKey, NodeName
from fabric.record.manifest import OwnerState
from router.fleet.directory import Holding
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLostError
from router.limits import LEASE_S
from router.moves.move_registry import MoveRegistry
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.lost_owners")
AGAIN_S = 2.0
LOST_OWNER_RETRY_S = LEASE_S  # if only the agent's node, or its next turn, brings it back


class LostOwners:
    """Takeovers of agents from lost nodes by current replicas."""

    def __init__(self, fleet: Fleet, moves: MoveRegistry, telemetry: Telemetry) -> None:
        self._fleet = fleet
        self._moves = moves
        self._telemetry = telemetry
        self._running: dict[AgentKey, asyncio.Task[None]] = {}

    async def require_owner_up(self, key: AgentKey) -> None:
        """Wait until a node that is up owns the agent, or no owner is known.

        Raises RetryLaterError if the owner is lost and no current replica can take over.
        """
        lost = self._lost_owner(key)
        if lost is None:
            return
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._take_over(key, lost))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key, None))
        await asyncio.shield(task)

    @asynccontextmanager
    async def calling_owner(self, key: AgentKey) -> AsyncIterator[None]:
        """Run a block that calls an agent's owner; raise RetryLaterError if it is not answered."""
        try:
            await self.require_owner_up(key)
            yield
        except NodeLostError as error:
            raise self._unreachable(key, error) from None

    def _unreachable(self, key: AgentKey, error: NodeLostError) -> RetryLaterError:
        """Name the node that did not answer, its part for the agent, and when to try again.

        A node that does not own the agent is the target of a move or a copy.
        """
        owner = self._fleet.directory.owner(key)
        is_owner = owner is not None and owner.node == error.node
        part = "which owns" if is_owner else "the target for"
        left_s = self._fleet.membership.lease_left_s(error.node)
        message = (
            f"node {error.node}, {part} agent {key[1]!r}, cannot be reached: {error.message}. "
            "Try again in a few seconds"
        )
        return RetryLaterError(message, retry_after_s=max(AGAIN_S, left_s), code=error.code)

    def _lost_owner(self, key: AgentKey) -> Holding | None:
        """Return the agent's claim if its node is lost and no other node is the owner."""
        directory = self._fleet.directory
        owner = directory.owner(key)
        if owner is not None:
            is_starting = directory.start_reservation(key) is not None  # a turn is taking it over
            return None if is_starting or self._fleet.is_up(owner.node) else owner
        if directory.released_owner(key) is not None or self._fleet.discovery.may_learn_agents():
            return None
        # Replicas whose owner left the fabric before this router started, or did not join in time.
        return max(
            directory.unerased_holdings(key), key=lambda holding: holding.epoch, default=None
        )

    async def _take_over(self, key: AgentKey, lost: Holding) -> None:
        self._moves.require_not_moving(key)
        if self._fleet.membership.is_returning(lost.node):
            message = f"node {lost.node}, which owns agent {key[1]!r}, is starting again"
            raise RetryLaterError(message, retry_after_s=AGAIN_S, code="node_lost")
        target = self._replica(key, lost)
        if target is None:
            raise self._no_replica(key, lost)
        epoch = self._fleet.begin_epoch(key)
        alias = self._fleet.alias(key)
        _LOG.warning("agent %s: the replica on %s takes over from %s", alias, target, lost.node)
        reservation = self._fleet.directory.reserve(key, target, epoch)
        reservation.turns_count += 1  # sends a turn that arrives meanwhile to the same node
        try:
            view = await self._fleet.link(target).call(TakeOver(*key, epoch), AgentView)
        except FabricError as error:
            _LOG.warning("agent %s: %s did not take over: %s", alias, target, error.code)
            raise
        finally:
            self._fleet.directory.release(key, reservation)
        self._telemetry.takeovers.inc()
        self._fleet.note_holding(key, target, view.epoch, OwnerState.OWNED, lost.group, view)

    def _replica(self, key: AgentKey, lost: Holding) -> NodeName | None:
        """Return the node of a replica that has all that the lost owner acknowledged."""
        is_owner_known = lost.state is not OwnerState.REPLICA
        replicas = [
            holding
            for holding in self._fleet.directory.unerased_holdings(key)
            if holding.state is OwnerState.REPLICA
            and self._fleet.is_alive(holding.node)
            and (holding.is_current(lost) or not is_owner_known)
        ]
        accepting = {view.name for view in self._fleet.ready()}
        best = max(replicas, key=lambda h: (h.epoch, h.node in accepting, h.node), default=None)
        return best.node if best is not None else None

    def _no_replica(self, key: AgentKey, lost: Holding) -> RetryLaterError:
        holdings = [h for h in self._fleet.directory.unerased_holdings(key) if h.node != lost.node]
        older = sorted(holding.node for holding in holdings if self._fleet.is_up(holding.node))
        replicas = (
            f"the replica on {', '.join(older)} is older"
            if older
            else "no other node has a replica"
        )
        message = (
            f"node {lost.node}, which owns agent {key[1]!r}, is lost, and {replicas}: "
            "start that node again, or send the agent's next turn with its messages, which "
            "starts the agent on another node"
        )
        return RetryLaterError(message, retry_after_s=LOST_OWNER_RETRY_S, code="owner_lost")

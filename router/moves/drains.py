"""Drains: move a node's agents away, several at once, the fastest to move first.

    drain ──▶ draining ──▶ drained          no agent is left
                 │  ▲
                 ▼  │ DRAIN_RETRY_S
               stuck                        some agents cannot move; the reasons are kept
    undrain: moves in progress finish, no further agent leaves

The node itself stores durably that it drains. Any router that finds such a node continues the
drain, so a router has no state to lose.
"""

import asyncio
import logging
import math
from dataclasses import dataclass, field
from enum import StrEnum

from fabric.control.node_calls import DRAINING, Done, DrainNode
from fabric.errors import FabricError, RetryLaterError
from fabric.ids import AgentKey, NodeName
from router.events import DrainChanged
from router.fleet import snapshots
from router.fleet.fleet import Fleet
from router.fleet.membership import Member
from router.fleet.node_client import NodeLostError
from router.limits import DRAIN_AT_ONCE_MAX, DRAIN_RETRY_S, DRAIN_ROUND_PAUSE_S, DRAIN_ROUNDS_MAX
from router.moves.move_registry import MoveRegistry
from router.placement.agent_moves import destination
from router.placement.decision import Ship

_LOG = logging.getLogger("macfabric.router.drains")

NOWHERE = RetryLaterError(
    "no other node of its version runs the agent's model, takes agents and has room for it",
    code="no_destination",
)


class DrainState(StrEnum):
    """Progress of a drain."""

    DRAINING = "draining"
    DRAINED = "drained"
    STUCK = "stuck"


@dataclass(slots=True)
class Drain:
    """Progress of one node's drain, and the errors of agents that could not move."""

    node: NodeName
    started_s: float
    state: DrainState = DrainState.DRAINING
    left_count: int = 0
    moved_count: int = 0
    sent_bytes: int = 0
    ended_s: float | None = None
    stuck: dict[AgentKey, FabricError] = field(default_factory=dict)
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class Drains:
    """Drains in progress in this router."""

    def __init__(self, fleet: Fleet, moves: MoveRegistry) -> None:
        self._fleet = fleet
        self._moves = moves
        self._drains: dict[NodeName, Drain] = {}

    def find(self, node: NodeName) -> Drain | None:
        return self._drains.get(node)

    async def start(self, node: NodeName) -> Drain:
        """Stop a node from taking new agents, and move its agents away; repeatable."""
        await self._set_draining(node, draining=True)
        return self._continue(node)

    async def stop(self, node: NodeName) -> None:
        """Let a node take agents again; agents that were moved away stay where they are."""
        self._drop(node)
        await self._set_draining(node, draining=False)
        self._drop(node)  # a sweep may have started it again meanwhile

    def sweep(self) -> None:
        """Continue the drains of nodes that report to be draining, and drop all others."""
        now_s = self._fleet.clock.monotonic_s()
        for member in self._fleet.membership.members:
            drain = self._drains.get(member.name)
            if not member.view or (drain is None and member.view.state != DRAINING):
                continue
            if not self._fleet.is_alive(member.name):
                continue
            if member.view.state != DRAINING:
                self._drop(member.name)
            elif drain is None or drain.ended_s is None or self._is_due(drain, now_s):
                self._continue(member.name)

    def _is_due(self, drain: Drain, now_s: float) -> bool:
        """Return whether a drain that ended has agents to try again."""
        assert drain.ended_s is not None, "it has ended"
        return now_s - drain.ended_s >= DRAIN_RETRY_S and bool(self._remaining_agents(drain.node))

    async def close(self) -> None:
        """Stop all drains; the next router continues them."""
        tasks = [drain.task for drain in self._drains.values() if drain.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def seconds(self, drain: Drain) -> float:
        ended_s = drain.ended_s
        return (self._fleet.clock.monotonic_s() if ended_s is None else ended_s) - drain.started_s

    async def _set_draining(self, node: NodeName, *, draining: bool) -> None:
        member = self._require(node)
        try:
            reply = await member.link.call(DrainNode(draining), Done)
        except NodeLostError as error:
            message = f"node {node} cannot be reached: {error.message}"
            raise RetryLaterError(message, retry_after_s=2.0, code=error.code) from None
        _LOG.info("node %s %s", node, reply.detail)
        await self._fleet.membership.heartbeat(member)

    def _require(self, node: NodeName) -> Member:
        member = self._fleet.membership.find(node)
        if member is None or not self._fleet.is_up(node):
            message = f"node {node} is not answering"
            raise RetryLaterError(message, retry_after_s=2.0, code="node_lost")
        return member

    def _continue(self, node: NodeName) -> Drain:
        drain = self._drains.get(node)
        if drain is None:
            drain = self._drains[node] = Drain(node, self._fleet.clock.monotonic_s())
        is_over = drain.state is DrainState.DRAINED and not self._remaining_agents(node)
        if not is_over and (drain.task is None or drain.task.done()):
            drain.state, drain.ended_s = DrainState.DRAINING, None
            drain.left_count = len(self._remaining_agents(node))
            self._publish_progress(drain)
            drain.task = asyncio.create_task(self._run(drain))
        return drain

    def _drop(self, node: NodeName) -> None:
        drain = self._drains.pop(node, None)
        if drain is not None and drain.task is not None:
            drain.task.cancel()  # moves in progress have tasks of their own

    def _publish_progress(self, drain: Drain) -> None:
        counts = drain.moved_count, drain.left_count, drain.sent_bytes
        self._fleet.events.publish(DrainChanged(drain.node, drain.state, *counts))

    def _remaining_agents(self, node: NodeName) -> list[AgentKey]:
        return self._fleet.directory.agents_of_node(node)

    # --- moving ------------------------------------------------------------------------------

    async def _run(self, drain: Drain) -> None:
        state, idle_rounds = DrainState.STUCK, 0
        try:
            while idle_rounds < DRAIN_ROUNDS_MAX:
                if idle_rounds:
                    await asyncio.sleep(DRAIN_ROUND_PAUSE_S)
                await self._fleet.membership.refresh(relist=True)
                remaining = self._remaining_agents(drain.node)
                self._count(drain)
                if not remaining:
                    state = DrainState.DRAINED
                    break
                moved_count = drain.moved_count
                await self._round(drain, remaining)
                idle_rounds = 0 if drain.moved_count > moved_count else idle_rounds + 1
        finally:
            drain.state, drain.ended_s = state, self._fleet.clock.monotonic_s()
            self._count(drain)
            self._publish_progress(drain)
        _LOG.info("node %s: %s, %d agents moved", drain.node, state, drain.moved_count)

    def _count(self, drain: Drain) -> None:
        remaining = set(self._remaining_agents(drain.node))
        drain.left_count = len(remaining)
        drain.stuck = {key: why for key, why in drain.stuck.items() if key in remaining}

    async def _round(self, drain: Drain, keys: list[AgentKey]) -> None:
        """Try every agent once, the fastest first: most have moved if the lid closes early."""
        slots = asyncio.Semaphore(DRAIN_AT_ONCE_MAX)

        async def move(key: AgentKey) -> None:
            async with slots:
                await self._move(drain, key)

        await asyncio.gather(*(move(key) for key in sorted(keys, key=self._travel_s)))

    def _travel_s(self, key: AgentKey) -> float:
        ship = self._ship(key)
        return ship.travel_s if ship is not None else math.inf

    def _ship(self, key: AgentKey) -> Ship | None:
        return destination(snapshots.of_agent(self._fleet, key))

    async def _move(self, drain: Drain, key: AgentKey) -> None:
        try:
            owner = self._fleet.require_owner(key)
        except FabricError as error:  # its last move is undecided, or it left by other means
            drain.stuck[key] = error
            return
        if owner.node != drain.node:
            return
        ship = self._ship(key)
        if ship is None:
            drain.stuck[key] = NOWHERE
            return
        try:
            with self._fleet.ledger.shipping(ship):
                receipt = await self._moves.migrate(*key, ship.target, holds=False)
        except FabricError as error:
            alias = self._fleet.alias(key)
            _LOG.info("agent %s stays on %s for now: %s", alias, drain.node, error.code)
            drain.stuck[key] = error
        else:
            drain.moved_count += 1
            drain.sent_bytes += receipt.bytes_sent
            drain.left_count = max(0, drain.left_count - 1)
            drain.stuck.pop(key, None)
            self._publish_progress(drain)

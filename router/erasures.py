"""Erases agents on every node, also on those that are away for the moment.

    DELETE ──▶ every node that answers: bytes go, a tombstone stays on its disk
    a node comes, or comes back ──▶ greeted with all tombstones before its lease begins

So an erasure outlives the router, and no node serves or lists what it slept through. What no
node could write down, the router owes in memory, and the receipt says who was out of reach.
"""

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace

from fabric.control import EraseAgent, EraseReceipt, KnownErasures, NodeView, ShareErasures
from fabric.erasure import Tombstones
from fabric.errors import ConflictError, FabricError, NotFoundError, RetryLaterError
from fabric.hashing import agent_digest
from fabric.ids import AgentId, NodeName, TenantId
from fabric.limits import ERASURE_EPOCHS, SUSPECT_S
from router.directory import Key
from router.fleet import Fleet
from router.fresh_ids import fresh_operation
from router.migrations import Migrations
from router.node_link import NodeLink
from router.replicas import Replicas
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.erasures")
HEARD_POLL_S = 0.02
HEARD_WAIT_S = 0.5  # below a beat, which repeats it


@dataclass(frozen=True, slots=True)
class Erasure:
    """What was removed where, and which nodes still have to be asked."""

    agent: AgentId
    receipts: tuple[EraseReceipt, ...]
    unreachable: tuple[NodeName, ...]


class Erasures:
    """Sends erasures to all nodes; those that do not answer get them when they are back."""

    def __init__(
        self,
        fleet: Fleet,
        migrations: Migrations,
        replicas: Replicas,
        telemetry: Telemetry,
        cluster_key: bytes,
    ) -> None:
        self.known = Tombstones()
        self._cluster_key = cluster_key
        self._fleet = fleet
        self._migrations = migrations
        self._replicas = replicas
        self._telemetry = telemetry
        self._owed: dict[NodeName, dict[Key, EraseAgent]] = {}
        self._heard: set[NodeName] = set()
        self._shared: dict[NodeName, int] = {}  # fingerprint of what a node knows
        self._since_s = fleet.clock.monotonic_s()

    def floor(self, key: Key) -> int:
        """Return up to which epoch an agent was erased, as far as any node has told."""
        return self.known.epoch_of(agent_digest(self._cluster_key, *key)) if self.known else 0

    async def erase(self, tenant: TenantId, agent: AgentId) -> Erasure:
        """Erase an agent; raise NotFoundError if no node has anything of it."""
        key = (tenant, agent)
        if self._migrations.is_moving(key):
            message = f"agent {agent} is being moved; erase it when that is done"
            raise ConflictError(message, code="migration_in_progress")
        async with self._replicas.barred(key):
            return await self._erase(key)

    async def _erase(self, key: Key) -> Erasure:
        agent, directory = key[1], self._fleet.directory
        holders = {holding.node for holding in directory.holdings(key)}
        holders |= {node for node, owed in self._owed.items() if key in owed}
        nodes = [member.name for member in self._fleet.membership.members]
        up = [node for node in nodes if self._fleet.is_up(node)]
        epoch = 0
        if holders or len(up) < len(nodes):
            # Above whatever a node that is away may claim; the next of this name is higher still.
            epoch = directory.next_epoch(key) + ERASURE_EPOCHS
        call = EraseAgent(fresh_operation(), *key, epoch, self._fleet.clock.wall_s())
        asked = await asyncio.gather(*(self._erase_on(node, call) for node in up))
        told = dict(zip(up, asked, strict=True))
        receipts = tuple(receipt for receipt in asked if receipt is not None)
        silent = tuple(node for node in nodes if told.get(node) is None)
        owing = tuple(node for node in silent if node in holders)
        if silent and not epoch:  # what is owed must not reach a later agent of this name
            epoch = directory.next_epoch(key) + ERASURE_EPOCHS
            call = replace(call, epoch=epoch)
        # Where a node has a tombstone, the greeting tells the others, who may hold a replica.
        # One whose disk refused knows it already, and finishes by itself.
        is_noted = any(receipt.tombstone is not None for receipt in receipts)
        for node in silent:
            if not is_noted:
                self._owed.setdefault(node, {})[key] = call
            self._forget(key, node)
        if epoch:
            directory.issue(key, epoch)
        if not owing and not any(receipt.existed for receipt in receipts):
            message = f"no agent is called {agent!r}"
            raise NotFoundError(message, code="unknown_agent")
        return Erasure(agent, receipts, owing)

    async def sweep(self) -> None:
        """Pay what is owed to nodes that answer again."""
        self.known.expire(self._fleet.clock.wall_s())
        for node in list(self._owed):
            if self._fleet.is_up(node):
                with suppress(RetryLaterError):
                    await self._pay(node)

    def is_told(self, view: NodeView) -> bool:
        """Say whether a node that was here all the time knows all erasures, and tells no more."""
        return view.erased == self.known.fingerprint and view.name not in self._owed

    async def greet(self, link: NodeLink, view: NodeView) -> None:
        """Tell a node what was erased and learn what it knows; raise FabricError if that fails."""
        await self._pay(link.name)
        await self._share(link, view.erased)
        self._heard.add(link.name)
        await self._await_others()
        await self._share(link, self._shared[link.name])

    async def _share(self, link: NodeLink, theirs: int) -> None:
        if theirs != self.known.fingerprint:
            call = ShareErasures(tuple(self.known))
            answer = await link.call(call, KnownErasures)
            now_s = self._fleet.clock.wall_s()
            self.known.merge(answer.erased, now_s)
            if answer.agents_removed:
                self._telemetry.erased_late(answer.agents_removed)
                _LOG.info("node %s removed %d erased agents", link.name, answer.agents_removed)
            whole = Tombstones()
            whole.merge(answer.erased, now_s)
            theirs = whole.fingerprint
        self._shared[link.name] = theirs

    async def _await_others(self) -> None:
        """Wait a moment at a router's start: another node may know of more erasures.

        Raises RetryLaterError if they stay away; who is not heard of in time is not waited for.
        """
        clock = self._fleet.clock
        patience_s = clock.monotonic_s() + HEARD_WAIT_S
        while not self._are_all_heard():
            if clock.monotonic_s() >= patience_s:
                message = "other nodes have not told yet what was erased"
                raise RetryLaterError(message, code="not_heard")
            await asyncio.sleep(HEARD_POLL_S)

    def _are_all_heard(self) -> bool:
        membership = self._fleet.membership
        if self._fleet.clock.monotonic_s() - self._since_s >= SUSPECT_S:
            return True
        return all(member.name in self._heard for member in membership.members)

    async def _pay(self, node: NodeName) -> None:
        owed = self._owed.get(node, {})
        for key, call in list(owed.items()):
            if await self._erase_on(node, call) is None:
                message = f"node {node} has not erased what it owes"
                raise RetryLaterError(message, code="erasure_owed")
            if owed.get(key) is call:  # a sweep may have been here, or a later erasure
                del owed[key]
        if not owed and self._owed.get(node) is owed:
            del self._owed[node]

    async def _erase_on(self, node: NodeName, call: EraseAgent) -> EraseReceipt | None:
        try:
            receipt = await self._fleet.link(node).call(call, EraseReceipt)
        except FabricError as error:
            _LOG.warning("node %s did not erase: %s", node, error.code)
            return None
        if receipt.tombstone is not None:
            self.known.merge([receipt.tombstone], self._fleet.clock.wall_s())
        self._forget((call.tenant, call.agent), node)
        return receipt

    def _forget(self, key: Key, node: NodeName) -> None:
        self._fleet.directory.forget(key, node)
        self._fleet.sketches.remove(key[0], node, key[1])

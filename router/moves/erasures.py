"""Erases agents on every node, also on those that are away for the moment.

    DELETE ──▶ every node that answers: bytes go, a tombstone stays on its disk
    a node comes, or comes back ──▶ told all tombstones before its lease begins

So an erasure outlives the router, and no node serves or lists what it slept through. What could
not be confirmed is named: a node that did not answer may hold anything of the agent.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from fabric.control.erasure_calls import EraseAgent, EraseReceipt, KnownErasures, ShareErasures
from fabric.control.node_calls import NodeView
from fabric.errors import FabricError, RetryLaterError
from fabric.ids import AgentId, AgentKey, NodeName, TenantId
from fabric.kvcache.hashing import agent_digest
from fabric.record.tombstone import Tombstones, tombstone
from router.fleet.fleet import Fleet
from router.fleet.node_client import NodeLink
from router.fleet.node_discovery import no_such_agent
from router.fresh_ids import fresh_operation
from router.limits import ERASURE_DIGESTS_MAX, SUSPECT_S
from router.moves.move_registry import MoveRegistry
from router.moves.replicas import Replicas
from router.telemetry import Telemetry

_LOG = logging.getLogger("macfabric.router.erasures")
HEARD_POLL_S = 0.02
HEARD_WAIT_S = 0.5  # below a heartbeat, which repeats it


@dataclass(frozen=True, slots=True)
class Erasure:
    """Progress of an erasure: removals by node, and nodes still to be asked."""

    agent: AgentId
    receipts: tuple[EraseReceipt, ...]
    unreachable: tuple[str, ...]  # names of nodes, and how many more are expected


class Erasures:
    """Sends erasures to all nodes; those that do not answer get them when they are back."""

    def __init__(
        self,
        fleet: Fleet,
        moves: MoveRegistry,
        replicas: Replicas,
        telemetry: Telemetry,
        cluster_key: bytes,
    ) -> None:
        self.known = Tombstones()
        self._cluster_key = cluster_key
        # Asked of every agent that a list names.
        self._digest = lru_cache(maxsize=ERASURE_DIGESTS_MAX)(
            lambda key: agent_digest(cluster_key, *key)
        )
        self._fleet = fleet
        self._moves = moves
        self._replicas = replicas
        self._telemetry = telemetry
        # Whoever else keeps something of agents forgets it.
        self.on_erased: Callable[[AgentKey], None] = lambda _: None
        self._heard: set[NodeName] = set()
        # Calls under way, by node and agent's digest: only their receipts count what is removed.
        self._erasing: set[tuple[NodeName, str]] = set()
        self._shared: dict[NodeName, int] = {}  # fingerprint of what a node knows
        self._since_s = fleet.clock.monotonic_s()

    def floor(self, key: AgentKey) -> int:
        """Return up to which epoch an agent was erased, as far as any node has told."""
        return self.known.epoch_of(self._digest(key)) if self.known else 0

    async def erase(self, tenant: TenantId, agent: AgentId) -> Erasure:
        """Erase an agent; raise NotFoundError if every node says that it has nothing of it.

        Raises RetryLaterError while nobody can say which nodes there are.
        """
        key = (tenant, agent)
        self._fleet.discovery.require_nodes()
        self._moves.refuse_moving(key)
        async with self._replicas.exclusive(key):
            return await self._erase(key)

    async def _erase(self, key: AgentKey) -> Erasure:
        agent, directory = key[1], self._fleet.directory
        was_known = bool(directory.living(key))
        epoch = self._fleet.erasure_epoch(key)
        erased_s = self.known.next_s(self._fleet.clock.wall_s())
        call = EraseAgent(*key, epoch, fresh_operation(), erased_s)
        made = tombstone(self._cluster_key, *key, epoch, call.erased_s)
        directory.issue(key, epoch)  # no turn that still runs is acknowledged
        # Before any node has answered: who owned the agent would be asked to go on above the
        # erasure, and lift above it what it is about to remove.
        self.known.merge([made])
        directory.note_erased(key)
        self.on_erased(key)
        nodes = [member.name for member in self._fleet.membership.members]
        up = [node for node in nodes if self._fleet.is_up(node)]
        asked = await asyncio.gather(*(self._erase_on(node, call) for node in up))
        told = dict(zip(up, asked, strict=True))
        receipts = tuple(receipt for receipt in asked if receipt is not None)
        silent = tuple(node for node in nodes if told.get(node) is None)
        # Whoever was not reached is told when it catches up. One whose disk refused knows it
        # already, and finishes by itself.
        for node in silent:
            self._fleet.sketches.remove(key[0], node, agent)
        discovery = self._fleet.discovery
        unreachable = (*silent, *discovery.missing.labels)
        if not was_known and not any(receipt.existed for receipt in receipts):
            if discovery.is_gathering() and not silent:  # who comes is told when it catches up
                raise discovery.unknown_agent(agent)
            if not unreachable:
                raise no_such_agent(agent)
        return Erasure(agent, receipts, unreachable)

    def is_caught_up(self, view: NodeView) -> bool:
        """Say whether a node that was here all the time knows all erasures, and tells no more."""
        return view.erased in {self.known.fingerprint, self._shared_with(view.name).fingerprint}

    async def catch_up(self, link: NodeLink, view: NodeView) -> None:
        """Tell a node what was erased and learn what it knows; raise FabricError if that fails."""
        await self._share(link, view.erased)
        self._heard.add(link.name)
        await self._await_others()
        await self._share(link, self._shared[link.name])

    async def _share(self, link: NodeLink, theirs: int) -> None:
        if theirs != self.known.fingerprint:
            call = ShareErasures(tuple(self._shared_with(link.name)))
            answer = await link.call(call, KnownErasures)
            self.known.merge(answer.erased)
            if answer.agents_removed:
                self._telemetry.erased_late(answer.agents_removed)
                _LOG.info("node %s removed %d erased agents", link.name, answer.agents_removed)
            whole = Tombstones()
            whole.merge(answer.erased)
            theirs = whole.fingerprint
        self._shared[link.name] = theirs

    def _shared_with(self, node: NodeName) -> Tombstones:
        """Return the known tombstones but for those that a call to the node brings now."""
        erasing = {agent for each, agent in self._erasing if each == node}
        if not erasing:
            return self.known
        shared = Tombstones()
        shared.merge(item for item in self.known if item.agent not in erasing)
        return shared

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

    async def _erase_on(self, node: NodeName, call: EraseAgent) -> EraseReceipt | None:
        name = (node, self._digest(call.key))
        self._erasing.add(name)
        try:
            receipt = await self._fleet.link(node).call(call, EraseReceipt)
        except FabricError as error:
            _LOG.warning("node %s did not erase: %s", node, error.code)
            return None
        finally:
            self._erasing.discard(name)
        self._fleet.directory.forget(call.key, node)
        self._fleet.sketches.remove(call.tenant, node, call.agent)
        return receipt

"""Erasure of agents on every node, including nodes that are away at the moment.

    DELETE ──▶ every node that answers: its bytes are removed, a tombstone stays on its disk

Nodes that are away get the tombstone when they return (`router/moves/erasure_exchange.py`). The
response names them: a node that did not answer may hold anything of the agent.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fabric.control.erasure_calls import EraseAgent, EraseReceipt
from fabric.errors import FabricError
from fabric.ids import AgentId, AgentKey, NodeName, TenantId
from fabric.record.tombstone import tombstone
from router.fleet.fleet import Fleet
from router.fleet.node_discovery import no_such_agent
from router.fresh_ids import fresh_operation
from router.moves.erasure_exchange import ErasureExchange
from router.moves.move_registry import MoveRegistry
from router.moves.replicas import Replicas

_LOG = logging.getLogger("macfabric.router.erasures")


@dataclass(frozen=True, slots=True)
class Erasure:
    """Result of an erasure: receipts of nodes, and nodes still to be reached."""

    agent: AgentId
    receipts: tuple[EraseReceipt, ...]
    unreachable: tuple[str, ...]  # names of nodes, and how many more are expected


class Erasures:
    """Erasures on all nodes; nodes that do not answer catch up when they return."""

    def __init__(
        self,
        fleet: Fleet,
        moves: MoveRegistry,
        replicas: Replicas,
        exchange: ErasureExchange,
        cluster_key: bytes,
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._replicas = replicas
        self._exchange = exchange
        self._cluster_key = cluster_key
        self._observers: list[Callable[[AgentKey], None]] = []

    def subscribe(self, observer: Callable[[AgentKey], None]) -> None:
        """Call `observer` with every agent that is erased, so that it drops its own data of it."""
        self._observers.append(observer)

    async def erase(self, tenant: TenantId, agent: AgentId) -> Erasure:
        """Erase an agent; raise NotFoundError if every node reports that it has nothing of it.

        Raises RetryLaterError while no node is known.
        """
        key = (tenant, agent)
        self._fleet.discovery.require_nodes()
        self._moves.require_not_moving(key)
        async with self._replicas.exclusive(key):
            return await self._erase(key)

    async def _erase(self, key: AgentKey) -> Erasure:
        agent, directory, tombstones = key[1], self._fleet.directory, self._exchange.known
        was_known = bool(directory.unerased_holdings(key))
        epoch = self._fleet.erasure_epoch(key)
        erased_s = tombstones.next_s(self._fleet.clock.wall_s())
        call = EraseAgent(*key, epoch, fresh_operation(), erased_s)
        directory.issue(key, epoch)  # fences turns that still run
        # Before any node has answered: otherwise a turn could go to the owner at an epoch above
        # the erasure, and so keep what the owner is about to remove.
        tombstones.merge([tombstone(self._cluster_key, *key, epoch, call.erased_s)])
        directory.note_erased(key)
        self._fleet.activity.forget(key)
        for observer in self._observers:
            observer(key)
        nodes = [member.name for member in self._fleet.membership.members]
        up = [node for node in nodes if self._fleet.is_up(node)]
        answers = await asyncio.gather(*(self._erase_on(node, call) for node in up))
        receipts = tuple(receipt for receipt in answers if receipt is not None)
        erased_on = {node for node, receipt in zip(up, answers, strict=True) if receipt is not None}
        # A node that was not reached catches up when it returns. One whose disk refused has the
        # tombstone in memory, and finishes the erasure itself.
        silent = tuple(node for node in nodes if node not in erased_on)
        for node in silent:
            self._fleet.sketches.remove(key[0], node, agent)
        discovery = self._fleet.discovery
        unreachable = (*silent, *discovery.missing.labels)
        if not was_known and not any(receipt.existed for receipt in receipts):
            if discovery.is_gathering() and not silent:  # nodes that join later catch up
                raise discovery.unknown_agent(agent)
            if not unreachable:
                raise no_such_agent(agent)
        return Erasure(agent, receipts, unreachable)

    async def _erase_on(self, node: NodeName, call: EraseAgent) -> EraseReceipt | None:
        with self._exchange.withhold_tombstone(node, call.key):
            try:
                receipt = await self._fleet.link(node).call(call, EraseReceipt)
            except FabricError as error:
                _LOG.warning("node %s did not erase: %s", node, error.code)
                return None
        self._fleet.directory.forget(call.key, node)
        self._fleet.sketches.remove(call.tenant, node, call.agent)
        return receipt

"""Erases agents on every node, also on those that are away for the moment."""

import asyncio
import logging
from dataclasses import dataclass

from fabric.control import EraseAgent, EraseReceipt
from fabric.errors import ConflictError, FabricError, NotFoundError
from fabric.ids import AgentId, NodeName, TenantId
from router.directory import Key
from router.fleet import Fleet
from router.fresh_ids import fresh_operation
from router.migrations import Migrations
from router.replicas import Replicas

_LOG = logging.getLogger("macfabric.router.erasures")


@dataclass(frozen=True, slots=True)
class Erasure:
    """What was removed where, and which nodes still have to be asked."""

    agent: AgentId
    receipts: tuple[EraseReceipt, ...]
    unreachable: tuple[NodeName, ...]


class Erasures:
    """Sends erasures to all nodes; those that do not answer get them when they are back."""

    def __init__(self, fleet: Fleet, migrations: Migrations, replicas: Replicas) -> None:
        self._fleet = fleet
        self._migrations = migrations
        self._replicas = replicas
        self._owed: dict[NodeName, set[Key]] = {}

    async def erase(self, tenant: TenantId, agent: AgentId) -> Erasure:
        """Erase an agent; raise NotFoundError if no node has anything of it."""
        key = (tenant, agent)
        if self._migrations.is_moving(key):
            message = f"agent {agent} is being moved; erase it when that is done"
            raise ConflictError(message, code="migration_in_progress")
        async with self._replicas.barred(key):
            return await self._erase(key)

    async def _erase(self, key: Key) -> Erasure:
        agent = key[1]
        holders = {holding.node for holding in self._fleet.directory.holdings(key)}
        nodes = [member.name for member in self._fleet.membership.members]
        answers = await asyncio.gather(*(self._erase_on(node, key) for node in nodes))
        receipts = tuple(receipt for receipt in answers if receipt is not None)
        silent = tuple(n for n, answer in zip(nodes, answers, strict=True) if answer is None)
        owing = tuple(node for node in silent if node in holders)
        for node in silent:
            # It may hold a replica that this router never heard of.
            self._owed.setdefault(node, set()).add(key)
        if not owing and not any(receipt.existed for receipt in receipts):
            message = f"no agent is called {agent!r}"
            raise NotFoundError(message, code="unknown_agent")
        return Erasure(agent, receipts, owing)

    async def sweep(self) -> None:
        """Pay what is owed to nodes that answer again."""
        for node, keys in list(self._owed.items()):
            if not self._fleet.is_up(node):
                continue
            for key in list(keys):
                if await self._erase_on(node, key) is None:
                    break
                keys.discard(key)
            if not keys:
                del self._owed[node]

    async def _erase_on(self, node: NodeName, key: Key) -> EraseReceipt | None:
        if not self._fleet.is_up(node):
            return None
        call = EraseAgent(fresh_operation(), *key)
        try:
            receipt = await self._fleet.link(node).call(call, EraseReceipt)
        except FabricError as error:
            _LOG.warning("node %s did not erase: %s", node, error.code)
            return None
        self._fleet.directory.forget(key, node)
        self._fleet.sketches.remove(key[0], node, key[1])
        return receipt

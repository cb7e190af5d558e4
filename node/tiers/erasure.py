"""Erasure of agents: running turn, record, blocks, quarantine, and other models' folders.

    tombstone ─▶ quarantine ─▶ other models ─▶ running turn ends ─▶ record ─▶ unreferenced blocks

The tombstone is written first, and the record is removed before its blocks, each durably, so the
next start finishes an erasure that a crash interrupted. `node.upkeep` retries what the disk
refused. An erasure is acknowledged only when it is complete.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fabric.control.erasure_calls import (
    EraseAgent,
    EraseReceipt,
    KnownErasures,
    RemovedElsewhere,
    ShareErasures,
)
from fabric.errors import FabricError, TooLargeError
from fabric.ids import AgentKey, OperationId, TenantId
from fabric.kvcache.block_chain import BlockRef
from fabric.limits import TOMBSTONES_MAX
from fabric.record.manifest import Manifest
from fabric.record.tombstone import Tombstone, tombstone
from node.agents.agent import Agent
from node.agents.agent_table import AgentTable
from node.limits import ERASE_CALLS_MAX
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.store.agent_store import AgentStore
from node.store.posix_disk import DiskError
from node.store.tombstones import TombstoneStore
from node.tiers.agent_records import AgentRecords
from node.tiers.derived_memory import DerivedMemory
from node.tiers.other_folders import ErasedFolders
from node.tiers.prefetch import Prefetches
from node.tiers.span_leases import SpanLeases
from node.transfer.offer_book import OfferBook


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of removing an agent: its blocks, and whether a record or the agent existed."""

    refs: Sequence[BlockRef] = ()
    had_record: bool = False
    was_here: bool = False


@dataclass(frozen=True, slots=True)
class AgentRemoval:
    """Removal of agents from a node; `forget_incoming` returns whether a move brought blocks."""

    records: AgentRecords
    offers: OfferBook
    prefetches: Prefetches
    forget_incoming: Callable[[AgentKey], Awaitable[bool]]
    leases: SpanLeases
    derived: DerivedMemory

    async def forget_moves(self, key: AgentKey) -> bool:
        """Drop the agent's incoming and offered blocks, of moves that no router will finish."""
        self.offers.withdraw_agent(key)
        was_borrowed = self.leases.forget(key)
        return await self.forget_incoming(key) or was_borrowed

    def forget_borrowed(self) -> None:
        """Drop rows borrowed from erased agents of any node."""
        self.leases.forget_erased()

    async def remove(self, key: AgentKey, epoch: int) -> Removed:
        """Remove an agent and its record; return what was removed."""
        records, table = self.records, self.records.table
        agent = table.get(key)
        if agent is None or agent.manifest.epoch > epoch:  # a newer agent of this name
            return Removed()
        _end_turn(agent, epoch)
        await self.prefetches.stop(agent)
        async with agent.turn_lock:
            if table.get(key) is not agent or agent.manifest.epoch > epoch:
                return Removed(was_here=table.get(key) is None)  # its first turn stored nothing
            # The agent stays in the table until then, so that a turn that starts now waits.
            saved, agent.cache = agent.saved, None
            had_record = await records.workers.run(lambda: records.store.has_record(key))
            refs = await records.workers.run(lambda: records.store.erase_record(key, saved))
            table.forget(agent)
        agent.outgoing.note_owned_elsewhere(epoch + 1)
        records.hot.note()
        return Removed(refs, had_record, was_here=True)


def _end_turn(agent: Agent, epoch: int) -> None:
    """Fence and cancel a running turn, which can no longer be saved or acknowledged."""
    agent.outgoing.note_erased(epoch)
    if agent.turn is not None:
        agent.turn.cancel()


T = TypeVar("T")

_log = logging.getLogger(__name__)
Operation = tuple[OperationId, AgentKey]


class Erasing:
    """Erasures on a node; used on its event loop."""

    def __init__(
        self,
        table: AgentTable,
        store: AgentStore,
        workers: Workers,
        erased: TombstoneStore,
        folders: ErasedFolders,
        removal: AgentRemoval,
        health: Health,
        cluster_key: bytes,
    ) -> None:
        self._table = table
        self._store = store
        self._workers = workers
        self._erased = erased
        self._folders = folders
        self._removal = removal
        self._health = health
        self._cluster_key = cluster_key
        self._operations: OrderedDict[Operation, asyncio.Task[EraseReceipt]] = OrderedDict()
        self._failures = self._retried_failures = 0
        # A previous process may have crashed right after writing a tombstone.
        self._is_unsure = bool(erased.all)

    @property
    def is_owed(self) -> bool:
        """Return whether this node must finish an erasure itself, as no caller repeats it."""
        return self.has_failed or self._is_unsure

    def recheck_all(self) -> None:
        """Apply all tombstones again, since a missing folder has come back."""
        self._is_unsure = True

    @property
    def has_failed(self) -> bool:
        """Return whether the disk refused a part of an erasure that no retry has completed."""
        return self._failures != self._retried_failures

    async def erase(self, call: EraseAgent) -> EraseReceipt:
        """Remove every byte of an agent; a repeated call gets the same receipt. Raise DiskError."""
        name = (call.operation, call.key)
        task = self._operations.get(name)
        if task is None:
            # Before the first wait: a turn that starts during it would raise the epoch above
            # the erasure's, and the agent would stay.
            self._removal.derived.begin_count(call.key[0], self._erased.digest(*call.key))
            self._erased.announce([self._tombstone(call)])
            task = self._operations[name] = asyncio.create_task(self._erase(call))
            while len(self._operations) > ERASE_CALLS_MAX:
                self._operations.popitem(last=False)
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and (task.cancelled() or task.exception()):
                self._operations.pop(name, None)  # a repeated call retries it

    async def take(self, call: ShareErasures) -> KnownErasures:
        """Remove agents that were erased while this node was away; retry later what fails."""
        if len(call.erased) > TOMBSTONES_MAX:
            message = f"one call may share at most {TOMBSTONES_MAX} tombstones"
            raise TooLargeError(message)
        erased = self._erased
        has_news = erased.announce(call.erased)
        await self._workers.run(erased.write_rest)
        if not has_news and not self.is_owed:
            return KnownErasures(erased.all, 0)
        return KnownErasures(erased.all, await self._remove_or_owe(is_sure=has_news))

    async def revoke(self, record: Manifest) -> None:
        """Revoke all rows that others have borrowed from a record's agent. Raise DiskError."""
        await self._workers.run(lambda: self._erased.revoke(record))

    @contextlib.asynccontextmanager
    async def revoking(self) -> AsyncIterator[None]:
        """Run a block; remove rows that it revoked, even if it raises. Raise DiskError."""
        before = self._erased.fingerprint
        try:
            yield
        finally:
            if self._erased.fingerprint != before:
                await self._remove_all(is_sure=True)

    async def finish(self) -> None:
        """Retry erasures that the disk refused; keep those that it refuses again.

        Nothing else retries it: this node's tombstones equal the others', so no exchange is due.
        """
        await self._remove_or_owe(is_sure=False)

    def _tombstone(self, call: EraseAgent) -> Tombstone:
        return tombstone(self._cluster_key, *call.key, call.epoch, call.erased_s)

    # --- one agent ---------------------------------------------------------------------------

    async def _erase(self, call: EraseAgent) -> EraseReceipt:
        tombstone = await self._note(call)
        try:
            receipt = await self._remove(call.key, call.epoch)
        except (FabricError, OSError):
            self._fail()
            raise
        finally:
            lender = self._erased.digest(*call.key)
            derived = self._removal.derived.end_count(call.key[0], lender)
        receipt = replace(
            receipt,
            existed=receipt.existed or derived.agents > 0,
            derived_agents=derived.agents,
            derived_tokens=derived.tokens,
        )
        if tombstone is None:  # the removal may have freed space on a full disk
            tombstone = await self._note(call)
        if tombstone is None:
            self._fail()
        return replace(receipt, tombstone=tombstone)

    async def _note(self, call: EraseAgent) -> Tombstone | None:
        tombstone = self._tombstone(call)
        with contextlib.suppress(DiskError):
            return await self._workers.run(lambda: self._erased.note(tombstone))
        return None

    async def _remove(self, key: AgentKey, epoch: int) -> EraseReceipt:
        """Remove all that can be removed; then raise the first error."""
        store, refused = self._store, list[Exception]()

        async def part(work: Callable[[], T], otherwise: T) -> T:
            try:
                return await self._workers.run(work)
            except (FabricError, OSError) as error:
                refused.append(error)
                return otherwise

        was_incoming = await self._removal.forget_moves(key)
        # Before the record: while the record exists, a restart knows the erasure is unfinished.
        quarantined = await part(lambda: store.erase_quarantined(key), otherwise=False)
        digest = self._erased.digest(*key)
        other_models = await part(lambda: self._folders.erase(digest), otherwise=RemovedElsewhere())
        removed = await self._removal.remove(key, epoch)
        unknown = await part(lambda: store.erase_unknown(key), otherwise=0)
        await self._drop_derived(key[0], refused)
        blocks = await self._workers.run(lambda: store.erase_blocks(removed.refs))
        # A block may have been found damaged during the wait.
        await part(lambda: store.erase_quarantined(key), otherwise=False)
        if refused:
            raise refused[0]
        return EraseReceipt(
            self._health.name,
            existed=removed.was_here
            or was_incoming
            or unknown > 0
            or quarantined
            or other_models.records > 0,
            blocks_removed=blocks.blocks_removed,
            bytes_removed=blocks.bytes_removed,
            blocks_kept_shared=blocks.blocks_kept_shared,
            bytes_kept_shared=blocks.bytes_kept_shared,
            record_removed=removed.had_record or unknown > 0,
            quarantined_removed=quarantined,
            other_models=other_models,
        )

    async def _drop_derived(self, tenant: TenantId | None, refused: list[Exception]) -> None:
        try:
            await self._removal.derived.drop(tenant)
        except (FabricError, OSError) as error:
            refused.append(error)

    # --- all that tombstones name ------------------------------------------------------------

    async def _remove_or_owe(self, *, is_sure: bool) -> int:
        """Remove all that tombstones name; return the number of agents, 0 if the disk refuses."""
        try:
            return await self._remove_all(is_sure=is_sure)
        except (FabricError, OSError) as error:
            _log.error("an erasure is not complete on the disk: %s", _reason(error))
            return 0

    async def _remove_all(self, *, is_sure: bool) -> int:
        """Remove all that tombstones name; return the number of agents. Raise DiskError.

        Unless `is_sure`, as after a start that may follow an interrupted erasure, quarantined files
        are kept if they name no erased agent.
        """
        failures = self._failures
        try:
            count = await self._remove_named(is_sure=is_sure or self.has_failed)
        except (FabricError, OSError):
            self._fail()
            raise
        self._is_unsure = False
        if await self._workers.run(self._erased.write_rest):
            self._retried_failures = failures  # later failures still need a retry
            self._health.owes_erasure = self.has_failed
        else:
            self._fail()
        return count

    def _fail(self) -> None:
        self._failures += 1
        self._health.owes_erasure = self.has_failed

    async def _remove_named(self, *, is_sure: bool) -> int:
        store, in_worker, count = self._store, self._workers.run, 0
        self._removal.forget_borrowed()
        refused = list[Exception]()
        for agent in self._table:
            # Also for known tombstones: an earlier attempt may have failed half-way.
            epoch = self._erased.floor(*agent.key)
            if agent.manifest.epoch <= epoch:
                await self._removal.forget_moves(agent.key)
                try:
                    count += (await self._removal.remove(agent.key, epoch)).was_here
                except (FabricError, OSError) as error:
                    refused.append(error)  # continue with the other agents
        await self._drop_derived(None, refused)
        if refused:
            raise refused[0]
        count += await in_worker(store.erase_unknown)
        await in_worker(store.blocks.sweep)
        await in_worker(lambda: store.erase_all_quarantined(is_sure=is_sure or count > 0))
        other_models = await in_worker(lambda: self._folders.erase(is_sure=is_sure))
        return count + other_models.records


def _reason(error: Exception) -> str:
    return error.reason if isinstance(error, DiskError) else type(error).__name__

"""Periodic background work of a node.

Upkeep    every minute: the data folders, the disk's limits, pins, moves whose router is gone, the
          time served
Retries   every 15 seconds, or at once when a save is requested: the data folders, unfinished
          erasures, failed saves, blocks of abandoned turns, records that still claim released
          agents, and inconclusive self-tests
"""

import asyncio
import math

from node.background_loop import BackgroundLoop
from node.folder_return import FolderReturn
from node.limits import FLUSH_IDLE_S, FLUSH_RETRY_S, RECLAIM_EVERY_S, SERVED_EVERY_S
from node.migration.incoming_cleanup import IncomingCleanup
from node.migration.ownership import OwnershipReleases
from node.runtime.health import Health
from node.runtime.workers import Workers
from node.self_test import SelfTests
from node.store.agent_store import AgentStore
from node.store.service_time import ServiceTime
from node.tiers.agent_records import AgentRecords
from node.tiers.disk_budget import DiskBudget, attempt
from node.tiers.erasure import Erasing
from node.tiers.flusher import Flusher
from node.tiers.hot_tier import Unsaved
from node.tiers.pins import Pins


class Upkeep:
    """Periodic upkeep of a node; used on its event loop."""

    def __init__(
        self,
        budget: DiskBudget,
        pins: Pins,
        cleanup: IncomingCleanup,
        store: AgentStore,
        workers: Workers,
        service_time: ServiceTime,
        folders: FolderReturn,
        health: Health,
    ) -> None:
        self._folders = folders
        self._budget = budget
        self._pins = pins
        self._cleanup = cleanup
        self._store = store
        self._workers = workers
        self._service_time = service_time
        self._saved_s = -math.inf
        self.loop = BackgroundLoop(
            "reclaiming disk space",
            self._step,
            health.note_failed_round,
            first_wait_s=RECLAIM_EVERY_S,
        )

    async def round(self) -> None:
        """Run one round now, unless the data folder is gone; log disk errors."""
        if not await self._folders.ensure_folders():
            return
        await self._budget.enforce()
        await attempt(self._pins.persist_all())
        await attempt(self._cleanup.abort_stale())
        await attempt(self._workers.run(self._store.settle_all))
        await self._save_service_time()

    async def _save_service_time(self) -> None:
        now_s = self._service_time.now_s
        if now_s - self._saved_s >= SERVED_EVERY_S:
            self._saved_s = now_s
            await self._workers.run(self._service_time.save)

    async def _step(self) -> float:
        await self.round()
        return RECLAIM_EVERY_S


class Retries:
    """Retries of a node's failed background work; used on its event loop."""

    def __init__(
        self,
        erasing: Erasing,
        records: AgentRecords,
        unsaved: Unsaved,
        flusher: Flusher,
        releases: OwnershipReleases,
        self_tests: SelfTests,
        folders: FolderReturn,
        health: Health,
    ) -> None:
        self._folders = folders
        self._erasing = erasing
        self._records = records
        self._unsaved = unsaved
        self._flusher = flusher
        self._step_downs = releases
        self._self_tests = self_tests
        self.loop = BackgroundLoop(
            "retrying failed saves",
            self._step,
            health.note_failed_round,
            first_wait_s=FLUSH_IDLE_S,
            hurry=unsaved.save_requested,
        )

    async def _step(self) -> float:
        if not await self._folders.ensure_folders():
            await asyncio.sleep(FLUSH_RETRY_S)  # also if `hurry` is set
            return FLUSH_IDLE_S
        if self._erasing.is_owed:
            await self._erasing.finish()
        if self._unsaved.agents() and await self._flusher.flush():
            await asyncio.sleep(FLUSH_RETRY_S)  # also if `hurry` is set
        await self._records.workers.run(self._records.store.sweep)
        await self._step_downs.finish_all()  # those of unsaved agents, after their save
        await self._self_tests.retry()
        return FLUSH_IDLE_S

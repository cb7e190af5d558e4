"""Return of a data folder that vanished while its node ran, and of its agents to the disk.

    gone      every write is refused; no agent counts as durable, so no cache leaves memory
    restored  tombstones, marker, spec, blocks and records are read again, or recreated
    agreed    each idle agent's record is compared with the stored one, and stored where it differs

Memory is authoritative: an older stored record is replaced, and a newer one quarantined.
"""

import asyncio
import logging
from dataclasses import replace

from fabric.errors import FabricError
from fabric.ids import AgentKey
from fabric.record.manifest import Manifest
from node.agents.agent import Agent
from node.agents.agent_table import found_agent
from node.drain_flag import DrainFlag
from node.runtime.health import Health
from node.store.data_folders import DataFolders
from node.store.posix_disk import DiskError
from node.store.service_time import ServiceTime
from node.tiers.agent_records import RecordMending
from node.tiers.erasure import Erasing
from node.tiers.hot_tier import Unsaved

TROUBLE = "data folder"

_log = logging.getLogger(__name__)


class FolderReturn:
    """Watch over a node's data folders; used on its event loop."""

    def __init__(
        self,
        folders: DataFolders | None,
        mending: RecordMending,
        unsaved: Unsaved,
        erasing: Erasing,
        service_time: ServiceTime,
        drain_flag: DrainFlag,
        health: Health,
    ) -> None:
        self._folders = folders
        self._mending = mending
        self._records = mending.records
        self._unsaved = unsaved
        self._erasing = erasing
        self._service_time = service_time
        self._drain_flag = drain_flag
        self._health = health
        self._lock = asyncio.Lock()
        self._unsynced: set[AgentKey] = set()  # agents that may differ from their stored records

    @property
    def is_gone(self) -> bool:
        """Return whether a folder was missing at the last check."""
        return TROUBLE in self._health.troubles

    async def ensure_folders(self) -> bool:
        """Restore a missing folder if possible; return whether all folders are present."""
        if self._folders is None:
            return True
        async with self._lock:
            return await self._ensure_folders(self._folders)

    async def _ensure_folders(self, folders: DataFolders) -> bool:
        run = self._records.workers.run
        if self.is_gone or not await run(folders.are_here):
            self._note_gone("it was removed, or its drive is unplugged")
            try:
                records = await run(folders.restore)
            except DiskError as error:
                self._note_gone(error.reason)
                return False
            await self._adopt_records(records)
        await self._sync_all()
        return True

    def _note_gone(self, reason: str) -> None:
        if not self.is_gone:
            _log.error("the data folder is gone: %s", reason)
        self._health.troubles[TROUBLE] = f"the data folder is gone: {reason}"
        for agent in self._records.table:
            if agent.saved is not None:
                self._unsynced.add(agent.key)
                if agent.is_durable:
                    agent.is_durable = False
                    self._records.table.note_change(agent.key)

    async def _adopt_records(self, found: list[Manifest]) -> None:
        records, name = self._records, self._health.name
        self._unsynced |= {agent.key for agent in records.table if agent.saved is not None}
        for record in found:
            if records.table.get(record.key) is not None:
                continue
            records.store.take_in(record)
            records.table.put(found_agent(record, name))
        self._erasing.recheck_all()
        await records.workers.run(self._service_time.save)
        if self._health.is_draining and not self._health.is_stopping:
            await self._drain_flag.note()
        self._health.troubles.pop(TROUBLE, None)
        _log.warning("the data folder is back, with %d agents", len(found))

    async def _sync_all(self) -> None:
        for key in sorted(self._unsynced):
            agent = self._records.table.get(key)
            if agent is not None and agent.is_busy:
                continue  # retried after its turn
            if agent is not None:
                async with agent.turn_lock:
                    try:
                        if self._records.is_here(agent):
                            await self._sync_record(agent)
                    except (FabricError, OSError) as error:
                        _log.error("an agent is in memory only: %s", type(error).__name__)
                        continue
            self._unsynced.discard(key)
        self._unsaved.note_success()

    async def _sync_record(self, agent: Agent) -> None:
        """Store an idle agent's record where the stored one differs; raise DiskError."""
        records, saved, record = self._records, agent.saved, agent.manifest
        if saved is None:
            return
        stored_version = await records.workers.run(lambda: records.store.version(agent.key))
        if stored_version > (record.epoch, record.revision):
            reason = "newer than memory"
            await records.workers.run(lambda: records.store.set_aside(agent.key, reason))
        if agent.is_unsaved:
            return  # the flusher saves it as it is in memory
        if stored_version != (saved.epoch, saved.revision):
            await records.republish(agent, replace(record, revision=record.revision + 1))
        agent.is_durable = True
        await self._mending.mend(agent)
        records.put(agent)

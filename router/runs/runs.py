"""Registry of the router's runs: started, resumed after a restart, cancelled, deleted."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

from fabric.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    RejectedError,
    RetryLaterError,
)
from fabric.fair_share import FairShare
from fabric.ids import AgentId, TenantId
from router.fresh_ids import fresh_name
from router.large_work import run_apart
from router.limits import (
    QUOTED_NAME_CHARS_MAX,
    SCENARIO_ENDED_MAX,
    SCENARIO_RUN_TURNS_MAX,
    SCENARIO_RUNS_MAX,
)
from router.runs.hosted_run import HostedRun, RunHost
from router.runs.run_folders import RunFolders, RunRecord, RunStatus
from router.runs.run_request import RunRequest
from router.scenario.source import ScenarioSource

_LOG = logging.getLogger("macfabric.router.runs")

RETRY_AFTER_S = 10.0  # a run takes seconds to hours
PLACE_POLL_S = 1.0
_Key = tuple[TenantId, str]


@dataclass(frozen=True, slots=True)
class RunRemoval:
    """Result of cancelling or deleting a run."""

    was_cancelled: bool  # False: it had already ended
    is_deleted: bool


class Runs:
    """Runs by tenant and name; no tenant can see another's."""

    def __init__(
        self,
        folders: RunFolders | None,
        host: RunHost,
        share: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Keep runs in `folders`; `share` waits until a standby router has them as they are."""
        self._share = share
        self._folders = folders
        self._host = host
        self._runs: dict[_Key, HostedRun] = {}
        self._places = FairShare[str](SCENARIO_RUNS_MAX)
        self._changing = asyncio.Lock()
        self._is_loaded = False
        self._dropping: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    # --- start and stop of the router --------------------------------------------------------

    async def resume_all(self) -> None:
        """Resume all unfinished runs of earlier processes."""
        if self._folders is None:
            return
        await self._load()
        for key, hosted in list(self._runs.items()):
            if not self._host.is_known(key[0]):
                hosted.fail("tenant_unknown", "its tenant no longer has a key in the settings")
            while hosted.is_waiting:
                if self._places.take(key[0]):
                    hosted.start(self._on_end, waits=True)
                else:
                    await asyncio.sleep(PLACE_POLL_S)  # until another run ends

    def stop(self) -> None:
        """Stop all runs and end their streams; the next process resumes them."""
        self._is_stopped = True
        for hosted in self._runs.values():
            hosted.stop()

    async def close(self) -> None:
        """Stop all runs and wait for their tasks."""
        self.stop()
        for hosted in list(self._runs.values()):
            await hosted.wait_stopped()
        await asyncio.gather(*self._dropping, return_exceptions=True)

    # --- requests ----------------------------------------------------------------------------

    async def begin(self, tenant: TenantId, request: RunRequest) -> HostedRun:
        """Start a run, resume one that was cancelled or failed, or return an existing one.

        Raises ConflictError for a name that another run has, and for agents in use.
        """
        folders = await self._load()
        model = await self._host.model(request.model)
        record, source = await run_apart(tenant, partial(self._read, tenant, request, model))
        key = tenant, record.name
        async with self._changing:
            known = self._runs.get(key)
            if known is not None:
                _require_alike(known.record, record)
                if known.end is None or known.end.status is RunStatus.ENDED:
                    return known
                record = known.record
            self._require_free(record)
            self._take_place(tenant)
            try:
                begin = partial(folders.begin, record, source, is_resumed=known is not None)
                await asyncio.to_thread(begin)
            except OSError as error:
                self._places.give(tenant)
                message = f"cannot write the run: {error.strerror}"
                raise RetryLaterError(message, code="disk_refused") from None
            except BaseException:
                self._places.give(tenant)
                raise
            hosted = HostedRun(record, None, folders, self._host)
            self._runs[key] = hosted
            hosted.start(self._on_end)
        if self._share is not None:
            await self._share()
        return hosted

    async def leave(self) -> None:
        """Stop all runs and forget them: another router resumes them from its copies."""
        for hosted in self._runs.values():
            hosted.stop()
        for hosted in list(self._runs.values()):
            await hosted.wait_stopped()
        async with self._changing:
            self._runs.clear()
            self._is_loaded = False

    async def all(self, tenant: TenantId) -> list[HostedRun]:
        """Return a tenant's runs, the oldest first."""
        await self._load()
        own_runs = [hosted for key, hosted in self._runs.items() if key[0] == tenant]
        return sorted(own_runs, key=lambda hosted: hosted.record.created_s)

    async def quoting(self, tenant: TenantId, agent: AgentId) -> tuple[str, ...]:
        """Return the names of a tenant's stored runs that quote an agent."""
        return tuple(each.record.name for each in await self._quoting(tenant, agent))

    async def _quoting(self, tenant: TenantId, agent: AgentId) -> list[HostedRun]:
        if self._folders is None or self._is_stopped:
            return []
        return [each for each in await self.all(tenant) if agent in each.record.agents]

    async def forget_quoting(self, tenant: TenantId, agent: AgentId) -> tuple[str, ...]:
        """Delete the ended runs that quote an agent; return the names of the deleted ones."""
        removed = []
        for hosted in await self._quoting(tenant, agent):
            try:
                if await self._delete(hosted):
                    removed.append(hosted.record.name)
            except RetryLaterError as error:
                _LOG.warning("cannot delete a run that quotes an erased agent: %s", error.message)
        return tuple(removed)

    async def get(self, tenant: TenantId, name: str) -> HostedRun:
        """Return a tenant's run; raise NotFoundError."""
        await self._load()
        hosted = self._runs.get((tenant, name))
        if hosted is None:
            message = f"there is no run {name[:QUOTED_NAME_CHARS_MAX]!r}; it may have been deleted"
            raise NotFoundError(message, code="run_not_found")
        return hosted

    async def remove(self, tenant: TenantId, name: str) -> RunRemoval:
        """Cancel a running run; delete one that has ended, with its files."""
        hosted = await self.get(tenant, name)
        if hosted.is_running:
            removal = RunRemoval(was_cancelled=await hosted.cancel(), is_deleted=False)
        else:
            removal = RunRemoval(was_cancelled=False, is_deleted=await self._delete(hosted))
        if self._share is not None:
            await self._share()
        return removal

    # --- internals ---------------------------------------------------------------------------

    async def _load(self) -> RunFolders:
        if self._folders is None or self._is_stopped:
            message = "this router has no folder for runs, or is stopping"
            raise RetryLaterError(message, code="no_runs")
        async with self._changing:
            if not self._is_loaded:
                for stored in await asyncio.to_thread(lambda f: list(f.all()), self._folders):
                    record = stored.record
                    hosted = HostedRun(record, stored.end, self._folders, self._host)
                    self._runs[TenantId(record.tenant), record.name] = hosted
                self._is_loaded = True
        return self._folders

    def _read(
        self, tenant: TenantId, request: RunRequest, model: str
    ) -> tuple[RunRecord, ScenarioSource]:
        """Return the record and source of a request; raise RejectedError."""
        source = request.source()
        record = RunRecord(
            tenant=tenant,
            name=fresh_name("run-") if request.name is None else request.name,
            key=fresh_name(""),
            created_s=self._host.clock.wall_s(),
            scenario="",
            title=None,
            turns_total=0,
            arm_turns=0,
            agents=(),
            model=model,
            digest=source.digest,
            namespace=request.namespace,
            repeats=request.repeats,
            is_compared=request.is_compared,
        )
        plan = record.plan(source)
        total = plan.turns * len(plan.arms)
        if total > SCENARIO_RUN_TURNS_MAX:
            message = f"{total:,} turns with all repeats, more than {SCENARIO_RUN_TURNS_MAX:,}"
            raise RejectedError(message, code="invalid_value", param="repeat")
        agents = {agent: None for arm in plan.arms for agent in plan.ids(arm).values()}
        scenario = plan.scenario
        named = replace(
            record,
            scenario=scenario.name,
            title=scenario.title,
            turns_total=total,
            arm_turns=plan.turns,
            agents=tuple(agents),
        )
        return named, source

    def _require_free(self, record: RunRecord) -> None:
        for hosted in self._runs.values():
            other = hosted.record
            is_other = (other.tenant, other.name) != (record.tenant, record.name)
            if hosted.is_running and is_other and other.shares_agents(record):
                _refuse_used(other.name)

    def _take_place(self, tenant: TenantId) -> None:
        if not self._places.take(tenant):
            message = "too many runs at once; wait until one ends, or cancel one"
            raise OverloadedError(message, retry_after_s=RETRY_AFTER_S, code="too_many_runs")

    def _on_end(self, hosted: HostedRun) -> None:
        self._places.give(hosted.tenant)
        if not self._is_stopped:
            task = asyncio.get_running_loop().create_task(self._drop_old())
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop_old(self) -> None:
        """Delete the oldest ended runs of the tenant with the most, down to the limit."""
        while True:
            ended = [each for each in self._runs.values() if not each.is_running]
            if len(ended) <= SCENARIO_ENDED_MAX:
                return
            most = Counter(each.tenant for each in ended).most_common(1)[0][0]
            own_runs = [each for each in ended if each.tenant == most]
            try:
                await self._delete(min(own_runs, key=lambda each: each.record.created_s))
            except RetryLaterError as error:
                _LOG.warning("cannot delete an old run: %s", error.message)
                return

    async def _delete(self, hosted: HostedRun) -> bool:
        """Delete a run that has ended; return False if it was resumed meanwhile."""
        assert self._folders is not None, "the run was read from them"
        key = hosted.tenant, hosted.record.name
        async with self._changing:
            if self._runs.get(key) is not hosted:
                return key not in self._runs
            if hosted.is_running:
                return False
            try:
                await asyncio.to_thread(self._folders.remove, *key)
            except OSError as error:
                message = f"cannot delete the run: {error.strerror}"
                raise RetryLaterError(message, code="disk_refused") from None
            del self._runs[key]
        return True


def _refuse_used(run: str) -> NoReturn:
    message = (
        f"run {run!r} uses the same agents; wait for its end, cancel it, "
        "or use separate agents with 'as'"
    )
    raise ConflictError(message, code="agents_in_use", param="as")


def _require_alike(existing: RunRecord, record: RunRecord) -> None:
    if not existing.is_alike(record):
        message = f"run {existing.name!r} has another scenario or options: choose another name"
        raise ConflictError(message, code="other_run", param="run")

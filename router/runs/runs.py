"""All runs of the router: begun, gone on with behind a restart, found, cancelled, forgotten."""

import asyncio
import logging
from collections import Counter
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
    NAME_CHARS_TOLD,
    SCENARIO_ENDED_MAX,
    SCENARIO_RUN_TURNS_MAX,
    SCENARIO_RUNS_MAX,
)
from router.runs.hosted_run import HostedRun, RunHost
from router.runs.run_folders import RunFolders
from router.runs.run_record import RunRecord, RunStatus
from router.runs.wanted_run import WantedRun
from router.scenario.script import Script

_LOG = logging.getLogger("macfabric.router.runs")

AGAIN_S = 10.0  # a run takes from seconds to hours
PLACE_POLL_S = 1.0
_Key = tuple[TenantId, str]


@dataclass(frozen=True, slots=True)
class Removed:
    """Result of deleting runs."""

    was_cancelled: bool  # else it had ended by itself
    is_gone: bool


class Runs:
    """Runs by tenant and name; nobody finds another tenant's."""

    def __init__(self, folders: RunFolders | None, host: RunHost) -> None:
        self._folders = folders
        self._host = host
        self._runs: dict[_Key, HostedRun] = {}
        self._places = FairShare[str](SCENARIO_RUNS_MAX)
        self._changing = asyncio.Lock()
        self._is_loaded = False
        self._dropping: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    # --- the router's life -------------------------------------------------------------------

    async def go_on(self) -> None:
        """Go on with all that an earlier process had not ended."""
        if self._folders is None:
            return
        await self._load()
        for key, hosted in list(self._runs.items()):
            if not self._host.is_known(key[0]):
                hosted.fail("tenant_unknown", "no key of its tenant is configured any more")
            while hosted.is_waiting:
                if self._places.take(key[0]):
                    hosted.start(self._ended, waits=True)
                else:
                    await asyncio.sleep(PLACE_POLL_S)  # until others' runs end

    def stop(self) -> None:
        """Let go of all runs, and end what follows them."""
        self._is_stopped = True
        for hosted in self._runs.values():
            hosted.stop()

    async def close(self) -> None:
        """Return once nothing of any run is under way."""
        self.stop()
        for hosted in list(self._runs.values()):
            await hosted.stopped()
        await asyncio.gather(*self._dropping, return_exceptions=True)

    # --- what clients ask for ----------------------------------------------------------------

    async def begin(self, tenant: TenantId, wanted: WantedRun) -> HostedRun:
        """Begin a run, go on with one that broke off, or return the one that was asked for.

        Raises ConflictError for a name that another run has, and for agents that are in use.
        """
        folders = await self._load()
        model = await self._host.model(wanted.model)
        record, script = await run_apart(tenant, partial(self._read, tenant, wanted, model))
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
                goes_on = known is not None
                await asyncio.to_thread(partial(folders.begin, record, script, goes_on=goes_on))
            except OSError as error:
                self._places.give(tenant)
                message = f"the router's disk takes no run: {error.strerror}"
                raise RetryLaterError(message, code="disk_refused") from None
            except BaseException:
                self._places.give(tenant)
                raise
            hosted = HostedRun(record, None, folders, self._host)
            self._runs[key] = hosted
            hosted.start(self._ended)
        return hosted

    async def all(self, tenant: TenantId) -> list[HostedRun]:
        """List a tenant's runs, the oldest first."""
        await self._load()
        own = [hosted for key, hosted in self._runs.items() if key[0] == tenant]
        return sorted(own, key=lambda each: each.record.created_s)

    async def quoting(self, tenant: TenantId, agent: AgentId) -> tuple[str, ...]:
        """Name the stored runs of a tenant that an agent took part in: they quote it."""
        return tuple(each.record.name for each in await self._quoting(tenant, agent))

    async def _quoting(self, tenant: TenantId, agent: AgentId) -> list[HostedRun]:
        if self._folders is None or self._is_stopped:
            return []
        return [each for each in await self.all(tenant) if agent in each.record.agents]

    async def forget_quoting(self, tenant: TenantId, agent: AgentId) -> tuple[str, ...]:
        """Remove the ended runs that quote an agent; name those, but not what the disk keeps."""
        removed = []
        for hosted in await self._quoting(tenant, agent):
            try:
                if await self._forget(hosted):
                    removed.append(hosted.record.name)
            except RetryLaterError as error:
                _LOG.warning("a run that quotes an erased agent stays: %s", error.message)
        return tuple(removed)

    async def get(self, tenant: TenantId, name: str) -> HostedRun:
        """Return one of the tenant's own; raise NotFoundError."""
        await self._load()
        hosted = self._runs.get((tenant, name))
        if hosted is None:
            message = f"no run is called {name[:NAME_CHARS_TOLD]!r}: none was, or not for so long"
            raise NotFoundError(message, code="run_not_found")
        return hosted

    async def remove(self, tenant: TenantId, name: str) -> Removed:
        """Cancel a run that is under way; forget one that has ended, with all that it wrote."""
        hosted = await self.get(tenant, name)
        if hosted.is_running:
            return Removed(was_cancelled=await hosted.cancel(), is_gone=False)
        return Removed(was_cancelled=False, is_gone=await self._forget(hosted))

    # --- within ------------------------------------------------------------------------------

    async def _load(self) -> RunFolders:
        if self._folders is None or self._is_stopped:
            message = "this router keeps no runs: it has no folder for them, or it stops"
            raise RetryLaterError(message, code="no_runs")
        async with self._changing:
            if not self._is_loaded:
                for stored in await asyncio.to_thread(lambda f: list(f.all()), self._folders):
                    record = stored.record
                    hosted = HostedRun(record, stored.end, self._folders, self._host)
                    self._runs[TenantId(record.tenant), record.name] = hosted
                self._is_loaded = True
        return self._folders

    def _read(self, tenant: TenantId, wanted: WantedRun, model: str) -> tuple[RunRecord, Script]:
        """Read what is wanted, however long that takes; raise RejectedError."""
        script = wanted.script()
        record = RunRecord(
            tenant=tenant,
            name=fresh_name("run-") if wanted.name is None else wanted.name,
            key=fresh_name(""),
            created_s=self._host.clock.wall_s(),
            scenario="",
            title=None,
            turns_total=0,
            arm_turns=0,
            agents=(),
            model=model,
            digest=script.digest,
            namespace=wanted.namespace,
            repeats=wanted.repeats,
            is_compared=wanted.is_compared,
        )
        plan = record.plan(script)
        total = plan.turns * len(plan.arms)
        if total > SCENARIO_RUN_TURNS_MAX:
            message = f"{total:,} turns with all repeats; one run has {SCENARIO_RUN_TURNS_MAX:,}"
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
        return named, script

    def _require_free(self, wanted: RunRecord) -> None:
        for hosted in self._runs.values():
            other = hosted.record
            is_other = (other.tenant, other.name) != (wanted.tenant, wanted.name)
            if hosted.is_running and is_other and other.shares_agents(wanted):
                _refuse_used(other.name)

    def _take_place(self, tenant: TenantId) -> None:
        if not self._places.take(tenant):
            message = "too many runs at once; wait until one ends, or cancel one"
            raise OverloadedError(message, retry_after_s=AGAIN_S, code="too_many_runs")

    def _ended(self, hosted: HostedRun) -> None:
        self._places.give(hosted.tenant)
        if not self._is_stopped:
            task = asyncio.get_running_loop().create_task(self._drop_old())
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop_old(self) -> None:
        """Forget the oldest run of the tenant with most, until few enough have ended."""
        while True:
            ended = [each for each in self._runs.values() if not each.is_running]
            if len(ended) <= SCENARIO_ENDED_MAX:
                return
            most = Counter(each.tenant for each in ended).most_common(1)[0][0]
            own = [each for each in ended if each.tenant == most]
            try:
                await self._forget(min(own, key=lambda each: each.record.created_s))
            except RetryLaterError as error:
                _LOG.warning("an old run is not forgotten: %s", error.message)
                return

    async def _forget(self, hosted: HostedRun) -> bool:
        """Remove a run that has ended; say whether it is gone, and not under way again."""
        assert self._folders is not None, "it was found there"
        key = hosted.tenant, hosted.record.name
        async with self._changing:
            if self._runs.get(key) is not hosted:
                return key not in self._runs
            if hosted.is_running:
                return False
            try:
                await asyncio.to_thread(self._folders.remove, *key)
            except OSError as error:
                message = f"the router's disk does not let go of it: {error.strerror}"
                raise RetryLaterError(message, code="disk_refused") from None
            del self._runs[key]
        return True


def _refuse_used(run: str) -> NoReturn:
    message = (
        f"run {run!r} uses the same agents; wait for its end, cancel it, "
        "or name a series of your own with 'as'"
    )
    raise ConflictError(message, code="agents_in_use", param="as")


def _require_alike(known: RunRecord, wanted: RunRecord) -> None:
    if not known.is_alike(wanted):
        message = f"run {known.name!r} is another one: name this one otherwise, or forget that"
        raise ConflictError(message, code="other_run", param="run")

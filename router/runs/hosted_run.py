"""One run in the router: under way, or ended.

begin ─▶ running ─▶ ended | cancelled | failed
            └─▶ the router stops: its disk says that it goes on
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from fabric.codec import to_plain
from fabric.errors import FabricError, NotFoundError
from fabric.ids import TenantId
from fabric.ports import Clock
from router.http.errors import unknown_error
from router.large_work import run_apart
from router.limits import SCENARIO_NODES_WAIT_S
from router.runs.run_folders import RunFolders
from router.runs.run_log import RunLog
from router.runs.run_record import RunEnd, RunRecord, RunStatus
from router.scenario.event_rows import event_name, event_row
from router.scenario.journal import RunJournal
from router.scenario.outcome import failed_verdicts, outcome_row
from router.scenario.run_events import AgentSpoke, Lasting, RunEvent
from router.scenario.run_state import RunState
from router.scenario.series import Arm, Series, SeriesPlan
from router.scenario.speaker import WAIT_S, ScenarioSpeaker

_LOG = logging.getLogger("macfabric.router.runs")
Row = dict[str, Any]


class RunHost(Protocol):
    """The fabric that runs are performed on."""

    @property
    def clock(self) -> Clock: ...

    async def model(self, name: str | None) -> str:
        """Return the model that is meant; raise FabricError where no node serves it."""
        ...

    def speaker(self, tenant: TenantId, model: str) -> ScenarioSpeaker:
        """Return who asks its agents as a tenant."""
        ...

    def is_known(self, tenant: TenantId) -> bool:
        """Say whether a tenant may still ask."""
        ...


class HostedRun:
    """Performs a run, tells of it, and has its end written down."""

    def __init__(
        self, record: RunRecord, end: RunEnd | None, folders: RunFolders, host: RunHost
    ) -> None:
        self.record = record
        self.end = end
        self._folders = folders
        self._host = host
        self._log = RunLog() if end is None else None  # None: it ended in another process
        self._series: Series | None = None
        self._turns_done = 0
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = self._is_ending = False
        self._replaying = asyncio.Lock()

    @property
    def tenant(self) -> TenantId:
        return TenantId(self.record.tenant)

    @property
    def is_running(self) -> bool:
        return self.end is None

    @property
    def is_waiting(self) -> bool:
        """Say whether it goes on, and has not been started in this process."""
        return self.end is None and self._task is None

    # --- how it is asked for -----------------------------------------------------------------

    def start(self, on_end: Callable[["HostedRun"], None], *, waits: bool = False) -> None:
        """Perform it from where its journals end; `waits`: nodes may still be to come."""
        self._told().tell("run.began", self._began())
        self._task = asyncio.create_task(self._run(waits=waits))
        self._task.add_done_callback(lambda _: on_end(self))

    async def cancel(self) -> bool:
        """End it early; return once that is written down, whether it did not end by itself."""
        self._is_cancelled = True
        if self._task is None:
            await self._write_end(self._ended(RunStatus.CANCELLED))
        else:
            if not self._is_ending:
                self._task.cancel()
            await asyncio.wait([self._task])
        return self.end is not None and self.end.status is RunStatus.CANCELLED

    def fail(self, code: str, message: str) -> None:
        """Start it no more, unless it has ended; its disk still says that it goes on."""
        if self.end is None:
            self._conclude(self._ended(RunStatus.FAILED, code=code, message=message))

    def stop(self) -> None:
        """Let go of it: another process goes on with it."""
        if self._log is not None:
            self._log.close()
        if self._task is not None:
            self._task.cancel()

    async def stopped(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    # --- what it tells -----------------------------------------------------------------------

    def row(self) -> Row:
        """Show it in short."""
        record, end = self.record, self.end
        error = end and end.code and {"code": end.code, "message": end.message}
        return {
            "id": record.name,
            "object": "scenario.run",
            "scenario": record.scenario,
            "title": record.title,
            "state": end.status.value if end else RunStatus.RUNNING.value,
            "holds": end.holds if end else None,
            "error": error or None,
            "model": record.model,
            "created_s": record.created_s,
            "ended_s": end.ended_s if end else None,
            "turns": {
                "done": end.turns_done if end else self._turns_done,
                "total": record.turns_total,
            },
        }

    async def whole_row(self) -> Row:
        """Show it with all that was said and measured so far."""
        row = self.row()
        if self._series is not None:
            return row | outcome_row(self._series.performed)
        none: Row = {"runs": [], "savings": []}
        if self.end is None:
            return row | none
        return row | none | await asyncio.to_thread(self._folders.outcome, self.record)

    async def log(self) -> RunLog:
        """Return its events; those of one that ended in another process are read again."""
        async with self._replaying:
            if self._log is None:
                try:
                    self._log = await self._replayed()
                except OSError:
                    message = "what this run wrote down is gone"
                    raise NotFoundError(message, code="run_not_found") from None
            return self._log

    async def _replayed(self) -> RunLog:
        log = RunLog()
        log.tell("run.began", self._began())
        for arm, events in await run_apart(self.tenant, lambda: list(self._journaled())):
            _tell_begin(log, arm, sum(isinstance(event, AgentSpoke) for event in events))
            for event in events:
                _tell(log, arm, event)
        assert self.end is not None, "one that runs has its log"
        log.tell("run.ended", self._told_end(self.end))
        log.close()
        return log

    def _journaled(self) -> Iterator[tuple[Arm, tuple[Lasting, ...]]]:
        plan, folder = self._plan(), self._folders.of(self.tenant, self.record.name)
        for arm in plan.arms:
            path = plan.journal(folder, arm)
            if path.exists():
                journal = RunJournal(path, plan.head(arm))
                journal.close()
                yield arm, journal.events

    def _plan(self) -> SeriesPlan:
        return self.record.plan(self._folders.script(self.record))

    def _began(self) -> Row:
        kept = ("scenario", "title", "model", "created_s", "turns_total", "arm_turns")
        return {"id": self.record.name} | {name: getattr(self.record, name) for name in kept}

    def _told_end(self, end: RunEnd) -> Row:
        row: Row = to_plain(end)
        return {"state": row.pop("status")} | row

    # --- how it is performed -----------------------------------------------------------------

    async def _run(self, *, waits: bool) -> None:
        try:
            end = await self._performed(waits=waits)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            end = self._ended(RunStatus.CANCELLED)
        except FabricError as error:
            where = f"{self._folders.of(self.tenant, self.record.name)}/"
            why = error.message.replace(where, "")  # where the router's disk has it is its own
            end = self._ended(RunStatus.FAILED, code=error.code, message=why)
        except OSError as error:
            why = f"the router's disk refuses the journal: {error.strerror}"
            end = self._ended(RunStatus.FAILED, code="disk_refused", message=why)
        except Exception as error:  # noqa: BLE001 - a run tells its end in any case
            known = unknown_error(error)
            end = self._ended(RunStatus.FAILED, code=known.code, message=known.message)
        if end.status is not RunStatus.ENDED and self._series is not None:
            await self._series.end_agents()
        await self._write_end(end)

    async def _performed(self, *, waits: bool) -> RunEnd:
        record = self.record
        plan = await run_apart(self.tenant, self._plan)
        if waits:
            await self._await_nodes()
        speaker = self._host.speaker(self.tenant, record.model)
        folder = self._folders.of(self.tenant, record.name)
        self._series = series = Series(plan, speaker, folder, self._watch, record.key)
        await series.perform()
        return self._ended(RunStatus.ENDED, holds=not failed_verdicts(series.performed))

    async def _await_nodes(self) -> None:
        """Wait until the model is served: a router that starts may be there before the nodes."""
        until_s = self._host.clock.monotonic_s() + SCENARIO_NODES_WAIT_S
        while True:
            try:
                await self._host.model(self.record.model)
            except FabricError as error:
                if self._host.clock.monotonic_s() > until_s:
                    raise
                _LOG.info("a run waits for its model: %s", error.code)
                await asyncio.sleep(WAIT_S)
            else:
                return

    async def _write_end(self, end: RunEnd) -> None:
        self._is_ending = True
        performed = self._series.performed if self._series is not None else []
        write = partial(self._folders.end, self.record, end, outcome_row(performed))
        try:
            await asyncio.to_thread(write)
            self._series = None  # the disk has it
        except OSError as error:
            _LOG.warning("the end of a run cannot be written: %s", error.strerror)
        self._conclude(end)

    def _conclude(self, end: RunEnd) -> None:
        self.end = end
        log = self._told()
        log.tell("run.ended", self._told_end(end))
        log.close()

    def _told(self) -> RunLog:
        assert self._log is not None, "it did not end in another process"
        return self._log

    def _ended(
        self,
        status: RunStatus,
        *,
        holds: bool | None = None,
        code: str | None = None,
        message: str | None = None,
    ) -> RunEnd:
        now_s = self._host.clock.wall_s()
        return RunEnd(status, now_s, self._turns_done, holds, code, message)

    @contextmanager
    def _watch(
        self, arm: Arm, state: RunState, done: Sequence[Lasting]
    ) -> Iterator[Callable[[RunEvent], None]]:
        _tell_begin(self._told(), arm, len(state.said))
        for event in done:
            self._note(arm, event)
        yield partial(self._note, arm)

    def _note(self, arm: Arm, event: RunEvent) -> None:
        self._turns_done += isinstance(event, AgentSpoke)
        _tell(self._told(), arm, event)


def _tell_begin(log: RunLog, arm: Arm, turns_done: int) -> None:
    log.tell("arm.began", {"number": arm.number, "arm": arm.kind, "turns_done": turns_done})


def _tell(log: RunLog, arm: Arm, event: RunEvent) -> None:
    row = {"number": arm.number, "arm": arm.kind, "event": event_row(event)}
    log.tell(event_name(event), row)

"""One run in the router, running or ended.

begin ─▶ running ─▶ ended | cancelled | failed
            └─▶ the router stops: the run is resumed by the next process
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
from router.runs.run_folders import RunEnd, RunFolders, RunRecord, RunStatus
from router.runs.run_log import RunLog
from router.scenario.event_rows import event_name, event_row
from router.scenario.fabric_client import RETRY_WAIT_S, FabricClient
from router.scenario.journal import RunJournal
from router.scenario.outcome import failed_verdicts, outcome_row
from router.scenario.run_events import AgentSpoke, DurableEvent, RunEvent
from router.scenario.run_state import RunState
from router.scenario.series import Arm, Series, SeriesPlan

_LOG = logging.getLogger("macfabric.router.runs")
Row = dict[str, Any]


class RunHost(Protocol):
    """Fabric that runs use."""

    @property
    def clock(self) -> Clock: ...

    async def model(self, name: str | None) -> str:
        """Return the resolved model name; raise FabricError where no node serves it."""
        ...

    def client(self, tenant: TenantId, model: str) -> FabricClient:
        """Return a client that acts for a tenant."""
        ...

    def is_known(self, tenant: TenantId) -> bool:
        """Return whether a tenant still has a key."""
        ...


class HostedRun:
    """A run with its log of events; runs its series and stores its end."""

    def __init__(
        self, record: RunRecord, end: RunEnd | None, folders: RunFolders, host: RunHost
    ) -> None:
        self.record = record
        self.end = end
        self._folders = folders
        self._host = host
        self._log = RunLog() if end is None else None  # None: ended in another process
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
        """Return whether the run must be resumed in this process."""
        return self.end is None and self._task is None

    # --- control -----------------------------------------------------------------------------

    def start(self, on_end: Callable[["HostedRun"], None], *, waits: bool = False) -> None:
        """Start from the end of its journals; `waits`: wait for nodes to serve the model."""
        self._live_log().append("run.began", self._start_fields())
        self._task = asyncio.create_task(self._run(waits=waits))
        self._task.add_done_callback(lambda _: on_end(self))

    async def cancel(self) -> bool:
        """Cancel the run and store its end; return False if it had already ended."""
        self._is_cancelled = True
        if self._task is None:
            await self._write_end(self._end_of(RunStatus.CANCELLED))
        else:
            if not self._is_ending:
                self._task.cancel()
            await asyncio.wait([self._task])
        return self.end is not None and self.end.status is RunStatus.CANCELLED

    def fail(self, code: str, message: str) -> None:
        """Mark a run as failed in this process; on disk it remains unfinished."""
        if self.end is None:
            self._conclude(self._end_of(RunStatus.FAILED, code=code, message=message))

    def stop(self) -> None:
        """Stop without an end: another process resumes the run."""
        if self._log is not None:
            self._log.close()
        if self._task is not None:
            self._task.cancel()

    async def wait_stopped(self) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])

    # --- views -------------------------------------------------------------------------------

    def row(self) -> Row:
        """Return the summary of the run."""
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

    async def full_row(self) -> Row:
        """Return the summary with transcripts, verdicts and figures so far."""
        row = self.row()
        if self._series is not None:
            return row | outcome_row(self._series.arm_runs)
        none: Row = {"runs": [], "savings": []}
        if self.end is None:
            return row | none
        return row | none | await asyncio.to_thread(self._folders.outcome, self.record)

    async def log(self) -> RunLog:
        """Return the run's events; read its journals if it ended in another process."""
        async with self._replaying:
            if self._log is None:
                try:
                    self._log = await self._replay()
                except OSError:
                    message = "the journals of this run no longer exist"
                    raise NotFoundError(message, code="run_not_found") from None
            return self._log

    async def _replay(self) -> RunLog:
        log = RunLog()
        log.append("run.began", self._start_fields())
        for arm, events in await run_apart(self.tenant, lambda: list(self._journal_events())):
            _append_arm(log, arm, sum(isinstance(event, AgentSpoke) for event in events))
            for event in events:
                _append_event(log, arm, event)
        assert self.end is not None, "a running run has its log"
        log.append("run.ended", self._end_fields(self.end))
        log.close()
        return log

    def _journal_events(self) -> Iterator[tuple[Arm, tuple[DurableEvent, ...]]]:
        plan, folder = self._plan(), self._folders.of(self.tenant, self.record.name)
        for arm in plan.arms:
            path = plan.journal(folder, arm)
            if path.exists():
                journal = RunJournal(path, plan.head(arm))
                journal.close()
                yield arm, journal.events

    def _plan(self) -> SeriesPlan:
        return self.record.plan(self._folders.source(self.record))

    def _start_fields(self) -> Row:
        names = ("scenario", "title", "model", "created_s", "turns_total", "arm_turns")
        return {"id": self.record.name} | {name: getattr(self.record, name) for name in names}

    def _end_fields(self, end: RunEnd) -> Row:
        row: Row = to_plain(end)
        return {"state": row.pop("status")} | row

    # --- execution ---------------------------------------------------------------------------

    async def _run(self, *, waits: bool) -> None:
        try:
            end = await self._perform(waits=waits)
        except asyncio.CancelledError:
            if not self._is_cancelled:
                raise
            end = self._end_of(RunStatus.CANCELLED)
        except FabricError as error:
            where = f"{self._folders.of(self.tenant, self.record.name)}/"
            message = error.message.replace(where, "")  # the router's paths stay private
            end = self._end_of(RunStatus.FAILED, code=error.code, message=message)
        except OSError as error:
            message = f"cannot write the journal: {error.strerror}"
            end = self._end_of(RunStatus.FAILED, code="disk_refused", message=message)
        except Exception as error:  # noqa: BLE001 - every run reports its end
            fabric_error = unknown_error(error)
            end = self._end_of(
                RunStatus.FAILED, code=fabric_error.code, message=fabric_error.message
            )
        if end.status is not RunStatus.ENDED and self._series is not None:
            await self._series.end_agents()
        await self._write_end(end)

    async def _perform(self, *, waits: bool) -> RunEnd:
        record = self.record
        plan = await run_apart(self.tenant, self._plan)
        if waits:
            await self._await_nodes()
        client = self._host.client(self.tenant, record.model)
        folder = self._folders.of(self.tenant, record.name)
        self._series = series = Series(plan, client, folder, self._watch, record.key)
        await series.run()
        return self._end_of(RunStatus.ENDED, holds=not failed_verdicts(series.arm_runs))

    async def _await_nodes(self) -> None:
        """Wait until the model is served: a router may start before its nodes."""
        until_s = self._host.clock.monotonic_s() + SCENARIO_NODES_WAIT_S
        while True:
            try:
                await self._host.model(self.record.model)
            except FabricError as error:
                if self._host.clock.monotonic_s() > until_s:
                    raise
                _LOG.info("run waits for its model: %s", error.code)
                await asyncio.sleep(RETRY_WAIT_S)
            else:
                return

    async def _write_end(self, end: RunEnd) -> None:
        self._is_ending = True
        arm_runs = self._series.arm_runs if self._series is not None else []
        write = partial(self._folders.end, self.record, end, outcome_row(arm_runs))
        try:
            await asyncio.to_thread(write)
            self._series = None  # stored on disk
        except OSError as error:
            _LOG.warning("cannot write the end of a run: %s", error.strerror)
        self._conclude(end)

    def _conclude(self, end: RunEnd) -> None:
        self.end = end
        log = self._live_log()
        log.append("run.ended", self._end_fields(end))
        log.close()

    def _live_log(self) -> RunLog:
        assert self._log is not None, "the run belongs to this process"
        return self._log

    def _end_of(
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
        self, arm: Arm, state: RunState, done: Sequence[DurableEvent]
    ) -> Iterator[Callable[[RunEvent], None]]:
        _append_arm(self._live_log(), arm, len(state.transcript))
        for event in done:
            self._publish(arm, event)
        yield partial(self._publish, arm)

    def _publish(self, arm: Arm, event: RunEvent) -> None:
        self._turns_done += isinstance(event, AgentSpoke)
        _append_event(self._live_log(), arm, event)


def _append_arm(log: RunLog, arm: Arm, turns_done: int) -> None:
    log.append("arm.began", {"number": arm.number, "arm": arm.kind, "turns_done": turns_done})


def _append_event(log: RunLog, arm: Arm, event: RunEvent) -> None:
    row = {"number": arm.number, "arm": arm.kind, "event": event_row(event)}
    log.append(event_name(event), row)

"""Folders of scenario runs on the router's disk, readable by their owner only.

DIR/<digest of tenant and name>/run.json      the run's record
                                script.json   the scenario's source
                                *.jsonl       journals, one for each arm
                                outcome.json  outcome, once it has ended
                                end.json      its end; without it, the run is unfinished
"""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fabric.codec import from_plain, to_plain
from fabric.errors import CorruptDataError, FabricError, RejectedError
from router.private_files import write_private
from router.scenario.series import SeriesPlan
from router.scenario.source import ScenarioSource

FORMAT = 1


class RunStatus(StrEnum):
    """Progress of a run."""

    RUNNING = "running"  # also while the router is down
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"  # with an error


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Request of a run, sufficient to resume it in another process."""

    tenant: str
    name: str
    key: str  # random part of operations' ids: a later run may have the same name
    created_s: float
    scenario: str
    title: str | None
    turns_total: int  # of all arms
    arm_turns: int  # of one
    agents: tuple[str, ...]  # ids of all agents that take part
    model: str
    digest: str  # of its source
    namespace: str
    repeats: int
    is_compared: bool
    format: int = FORMAT

    def plan(self, source: ScenarioSource) -> SeriesPlan:
        """Read the scenario and plan its arms; raise RejectedError if this version refuses it."""
        scenario = source.read()
        return SeriesPlan(
            scenario, self.name, self.digest, self.namespace, self.repeats, self.is_compared
        )

    def is_alike(self, other: "RunRecord") -> bool:
        """Return whether two records request the same run."""
        return self._request() == other._request()  # noqa: SLF001 - of the same class

    def shares_agents(self, other: "RunRecord") -> bool:
        """Return whether an agent takes part in both runs."""
        return self.tenant == other.tenant and not set(self.agents).isdisjoint(other.agents)

    def _request(self) -> tuple[Any, ...]:
        return (self.digest, self.model, self.namespace, self.repeats, self.is_compared)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run, with the error code and message of a failed one."""

    status: RunStatus
    ended_s: float
    turns_done: int
    holds: bool | None = None  # None: not all turns have ended
    code: str | None = None
    message: str | None = None


_LOG = logging.getLogger("macfabric.router.runs")
_NAME_BYTES = 16
_RECORD, _SOURCE, _END, _OUTCOME = "run.json", "script.json", "end.json", "outcome.json"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Run read from disk; without an end, it is unfinished."""

    record: RunRecord
    end: RunEnd | None


class RunFolders:
    """Storage of runs; every method blocks on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, tenant: str, name: str) -> Path:
        digest = blake2b(f"{tenant}\0{name}".encode(), digest_size=_NAME_BYTES).hexdigest()
        return self._path / digest

    def begin(self, record: RunRecord, source: ScenarioSource, *, is_resumed: bool) -> None:
        """Store the record and source of a new or resumed run; raise OSError."""
        folder = self.of(record.tenant, record.name)
        if folder.exists() and not is_resumed:  # left by another version, and unreadable
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (_END, _OUTCOME):
            (folder / name).unlink(missing_ok=True)
        write_private(folder / _SOURCE, json.dumps(to_plain(source)))
        write_private(folder / _RECORD, json.dumps(to_plain(record)))

    def source(self, record: RunRecord) -> ScenarioSource:
        """Return a run's source; raise OSError, or CorruptDataError."""
        path = self.of(record.tenant, record.name) / _SOURCE
        try:
            source: ScenarioSource = from_plain(
                ScenarioSource, json.loads(path.read_text()), _SOURCE
            )
        except (ValueError, RejectedError):
            message = f"{path} is not a scenario source of this version"
            raise CorruptDataError(message) from None
        return source

    def end(self, record: RunRecord, end: RunEnd, outcome: dict[str, Any]) -> None:
        """Store a run's outcome and end; raise OSError."""
        folder = self.of(record.tenant, record.name)
        write_private(folder / _OUTCOME, json.dumps(outcome))
        write_private(folder / _END, json.dumps(to_plain(end)))

    def outcome(self, record: RunRecord) -> dict[str, Any]:
        """Return the outcome of an ended run; empty if it cannot be read."""
        try:
            value = json.loads((self.of(record.tenant, record.name) / _OUTCOME).read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def remove(self, tenant: str, name: str) -> None:
        """Delete a run's files; raise OSError."""
        folder = self.of(tenant, name)
        if folder.exists():
            # Without its record it is not resumed, even if the deletion is cut off.
            (folder / _RECORD).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def all(self) -> Iterator[StoredRun]:
        """Yield all readable runs, the oldest first; finish interrupted deletions."""
        runs = []
        for folder in self._path.glob("*/"):
            try:
                runs.append(self._read_run(folder))
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
            except (OSError, ValueError, FabricError) as error:
                _LOG.warning("cannot read the run in %s: %s", folder.name, type(error).__name__)
        yield from sorted(runs, key=lambda run: run.record.created_s)

    def _read_run(self, folder: Path) -> StoredRun:
        raw = json.loads((folder / _RECORD).read_text())
        record: RunRecord = from_plain(RunRecord, raw, _RECORD)
        if record.format != FORMAT:
            message = f"format {record.format} belongs to another version"
            raise RejectedError(message)
        end = folder / _END
        if not end.exists():
            return StoredRun(record, None)
        return StoredRun(record, from_plain(RunEnd, json.loads(end.read_text()), _END))

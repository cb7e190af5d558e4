"""Runs on the router's disk, open to its owner alone.

DIR/<digest of tenant and name>/run.json      how it was asked for
                                script.json   its scenario as text, with all that it names
                                *.jsonl       journals, one for each performance
                                outcome.json  what came of it, once it has ended
                                end.json      how it ended; without it, it goes on
"""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fabric.codec import from_plain, to_plain
from fabric.errors import CorruptDataError, FabricError, RejectedError
from router.private_files import write_private
from router.runs.run_record import FORMAT, RunEnd, RunRecord
from router.scenario.script import Script

_LOG = logging.getLogger("macfabric.router.runs")
_NAME_BYTES = 16
_ASKED, _SCRIPT, _END, _OUTCOME = "run.json", "script.json", "end.json", "outcome.json"


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it was found on disk; without an end, it goes on."""

    record: RunRecord
    end: RunEnd | None


class RunFolders:
    """Reads and writes them; every call may take as long as a drive does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, tenant: str, name: str) -> Path:
        digest = blake2b(f"{tenant}\0{name}".encode(), digest_size=_NAME_BYTES).hexdigest()
        return self._path / digest

    def begin(self, record: RunRecord, script: Script, *, goes_on: bool) -> None:
        """Write down that a run begins, or goes on; raise OSError."""
        folder = self.of(record.tenant, record.name)
        if folder.exists() and not goes_on:  # what no version of ours could read
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (_END, _OUTCOME):
            (folder / name).unlink(missing_ok=True)
        write_private(folder / _SCRIPT, json.dumps(to_plain(script)))
        write_private(folder / _ASKED, json.dumps(to_plain(record)))

    def script(self, record: RunRecord) -> Script:
        """Return what a run performs; raise OSError, or CorruptDataError."""
        path = self.of(record.tenant, record.name) / _SCRIPT
        try:
            script: Script = from_plain(Script, json.loads(path.read_text()), _SCRIPT)
        except (ValueError, RejectedError):
            message = f"{path} is no scenario of this version"
            raise CorruptDataError(message) from None
        return script

    def end(self, record: RunRecord, end: RunEnd, outcome: dict[str, Any]) -> None:
        """Write down how a run ended, and what came of it; raise OSError."""
        folder = self.of(record.tenant, record.name)
        write_private(folder / _OUTCOME, json.dumps(outcome))
        write_private(folder / _END, json.dumps(to_plain(end)))

    def outcome(self, record: RunRecord) -> dict[str, Any]:
        """Return what came of a run that has ended; nothing where the disk has lost it."""
        try:
            value = json.loads((self.of(record.tenant, record.name) / _OUTCOME).read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def remove(self, tenant: str, name: str) -> None:
        """Remove all of a run; raise OSError."""
        folder = self.of(tenant, name)
        if folder.exists():
            # It goes on no more, even if this is cut off.
            (folder / _ASKED).unlink(missing_ok=True)
            shutil.rmtree(folder)

    def all(self) -> Iterator[StoredRun]:
        """Yield all that can be read, the oldest first; what was being removed goes."""
        found = []
        for folder in self._path.glob("*/"):
            try:
                found.append(self._stored(folder))
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)
            except (OSError, ValueError, FabricError) as error:
                _LOG.warning("a run in %s cannot be read: %s", folder.name, type(error).__name__)
        yield from sorted(found, key=lambda each: each.record.created_s)

    def _stored(self, folder: Path) -> StoredRun:
        raw = json.loads((folder / _ASKED).read_text())
        record: RunRecord = from_plain(RunRecord, raw, _ASKED)
        if record.format != FORMAT:
            message = f"format {record.format} is of another version"
            raise RejectedError(message)
        end = folder / _END
        if not end.exists():
            return StoredRun(record, None)
        return StoredRun(record, from_plain(RunEnd, json.loads(end.read_text()), _END))

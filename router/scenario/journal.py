"""A run's journal: one line of JSON for each thing that need not be done again.

    {"run": "run-1", "scenario": "debate", "digest": "…", "format": 1}
    {"event": "turn", "of": {…}}

Each line is on the drive before anybody is told of it. A last line that was cut off is dropped.
"""

import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fabric.codec import dump_json, from_plain, left_out, parse_json
from fabric.errors import ConflictError, CorruptDataError, RejectedError
from router.limits import SCENARIO_LINE_BYTES_MAX
from router.scenario.run_events import AgentCopied, AgentSpoke, Lasting, MemoryEdited, StepTaken

FORMAT: Final = 1
_KINDS: Final = MappingProxyType(
    {"step": StepTaken, "turn": AgentSpoke, "copy": AgentCopied, "edit": MemoryEdited}
)
_NAMES: Final = MappingProxyType({kind: name for name, kind in _KINDS.items()})


@dataclass(frozen=True, slots=True)
class JournalHead:
    """Which run it is; `digest` is of the scenario, its files and its variables."""

    run: str
    scenario: str
    digest: str
    format: int = FORMAT
    # Random: operations are named after it, as another run may have the same name. Older have none.
    key: str | None = field(default=None, metadata=left_out())


class RunJournal:
    """An open journal; one process writes it at a time."""

    def __init__(self, path: Path, head: JournalHead) -> None:
        """Open or begin one; raise ConflictError where it is another run's, or is written to."""
        self.path = path
        self.key = head.key  # that of the run which began it, once it was read
        self._writing = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b")
        try:
            _lock(self._file.fileno(), path)
            self.events = tuple(self._read(head))
        except BaseException:
            self._file.close()
            raise

    def _read(self, head: JournalHead) -> Iterator[Lasting]:
        end = number = 0
        while raw := self._file.readline(SCENARIO_LINE_BYTES_MAX):
            if not raw.endswith(b"\n"):
                break  # a line that a crash cut off: what it told of is done again
            number, end = number + 1, end + len(raw)
            where = f"{self.path}, line {number}"
            try:
                value = parse_json(raw)
                read = (
                    from_plain(JournalHead, value, where) if number == 1 else _event(value, where)
                )
            except RejectedError as error:
                message = f"{where} is none of a run's journal: {error.message}"
                raise CorruptDataError(message) from None
            if not isinstance(read, JournalHead):
                yield read
            elif replace(read, key=head.key) != head:
                raise ConflictError(_difference(read, head), code="other_run")
            else:
                self.key = read.key
        self._file.seek(end)
        self._file.truncate(end)
        if not number:
            self._write(dump_json(head))
            _sync_folder(self.path.parent)

    def note(self, event: Lasting) -> None:
        """Write an event down, from any thread; raise OSError, also where this was closed."""
        line = dump_json({"event": _NAMES[type(event)], "of": event})
        with self._writing:
            if self._file.closed:
                raise OSError(errno.EBADF, "the journal is closed", str(self.path))
            self._write(line)

    def _write(self, line: bytes) -> None:
        self._file.write(line + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let others open it."""
        with self._writing:
            self._file.close()


def _event(value: object, where: str) -> Lasting:
    kind = _KINDS.get(value.get("event", "")) if isinstance(value, dict) else None
    if kind is None or not isinstance(value, dict):
        message = "no event that there is"
        raise RejectedError(message)
    event: Lasting = from_plain(kind, value.get("of"), where)
    return event


def _difference(found: JournalHead, wanted: JournalHead) -> str:
    if found.run != wanted.run or found.scenario != wanted.scenario:
        return (
            f"run {found.run!r} is one of scenario {found.scenario!r}: give this run another name"
        )
    if found.format != wanted.format:
        return f"the journal has format {found.format}, this version writes {wanted.format}"
    return f"the scenario was changed since run {found.run!r} began: give this run another name"


def _lock(descriptor: int, path: Path) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        message = f"another process performs this run and writes {path}: the run goes on there"
        raise ConflictError(message, code="run_in_progress") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

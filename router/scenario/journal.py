"""Journal of one arm of a run: one line of JSON for each durable event.

    {"run": "run-1", "scenario": "debate", "digest": "…", "format": 1}
    {"event": "turn", "of": {…}}

A line is on the drive before its event is reported. An incomplete last line is dropped.

`run_in_thread` runs a run's blocking work, such as journals and long prompts, in its own thread
pool: the threads of asyncio's default pool may all be waiting for answers.
"""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from fabric.codec import dump_json, from_plain, left_out, parse_json
from fabric.errors import ConflictError, CorruptDataError, RejectedError
from router.limits import SCENARIO_LINE_BYTES_MAX
from router.scenario.run_events import (
    AgentCopied,
    AgentSpoke,
    DurableEvent,
    MemoryEdited,
    StepTaken,
)

FORMAT: Final = 1
_KINDS: Final = MappingProxyType(
    {"step": StepTaken, "turn": AgentSpoke, "copy": AgentCopied, "edit": MemoryEdited}
)
_NAMES: Final = MappingProxyType({kind: name for name, kind in _KINDS.items()})


@dataclass(frozen=True, slots=True)
class JournalHead:
    """First line of a journal, which identifies the run; `digest` is the scenario source's."""

    run: str
    scenario: str
    digest: str
    format: int = FORMAT
    # Random part of operation ids, since a later run may reuse the name. Older journals lack it.
    key: str | None = field(default=None, metadata=left_out())


class RunJournal:
    """Open journal, locked by one process."""

    def __init__(self, path: Path, head: JournalHead) -> None:
        """Open or create a journal; raise ConflictError if it is another run's or is locked."""
        self.path = path
        self.key = head.key  # replaced by the stored one
        self._writing = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b")
        try:
            _lock(self._file.fileno(), path)
            self.events = tuple(self._read(head))
        except BaseException:
            self._file.close()
            raise

    def _read(self, head: JournalHead) -> Iterator[DurableEvent]:
        end = number = 0
        while raw := self._file.readline(SCENARIO_LINE_BYTES_MAX):
            if not raw.endswith(b"\n"):
                break  # cut off by a crash: its step is repeated
            number, end = number + 1, end + len(raw)
            where = f"{self.path}, line {number}"
            try:
                value = parse_json(raw)
                entry = (
                    from_plain(JournalHead, value, where) if number == 1 else _event(value, where)
                )
            except RejectedError as error:
                message = f"{where} is not a valid journal entry: {error.message}"
                raise CorruptDataError(message) from None
            if not isinstance(entry, JournalHead):
                yield entry
            elif replace(entry, key=head.key) != head:
                raise ConflictError(_difference(entry, head), code="other_run")
            else:
                self.key = entry.key
        self._file.seek(end)
        self._file.truncate(end)
        if not number:
            self._write(dump_json(head))
            _sync_folder(self.path.parent)

    def append(self, event: DurableEvent) -> None:
        """Write an event durably, from any thread; raise OSError if that fails or after close()."""
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
        """Unlock the journal."""
        with self._writing:
            self._file.close()


def _event(value: object, where: str) -> DurableEvent:
    kind = _KINDS.get(value.get("event", "")) if isinstance(value, dict) else None
    if kind is None or not isinstance(value, dict):
        message = "unknown event"
        raise RejectedError(message)
    event: DurableEvent = from_plain(kind, value.get("of"), where)
    return event


def _difference(stored: JournalHead, expected: JournalHead) -> str:
    if stored.run != expected.run or stored.scenario != expected.scenario:
        owner = f"run {stored.run!r} of scenario {stored.scenario!r}"
        return f"the journal belongs to {owner}: give this run another name"
    if stored.format != expected.format:
        return f"the journal has format {stored.format}, this version writes {expected.format}"
    return f"the scenario has changed since run {stored.run!r} began: give this run another name"


def _lock(descriptor: int, path: Path) -> None:
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        message = f"the run is in progress in another process, which has locked {path}"
        raise ConflictError(message, code="run_in_progress") from None


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


T = TypeVar("T")

_THREADS = 4
_WORKERS = ThreadPoolExecutor(_THREADS, thread_name_prefix="scenario")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run a function in a thread; it finishes even if its caller is cancelled."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work)

"""Every legal content of a disk after a power loss, for a trace of operations.

A trace lists the operations that a program requested. Until a file is flushed, any of its written
pages may be missing, zero or cut; until a directory is flushed, any of the changes to its entries
may be missing, in any order. Everything else must be present, except the contents of the drive's
cache: operations flushed since it was last emptied may be missing, from any point on.

`CrashDisk` performs a publish as a chosen list of steps and records such a trace.
"""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod

from fabric.errors import CorruptDataError
from tests.support.opened_file import OpenedFile

PAGE_BYTES = 8192
SUBSETS_MAX = 4  # with more independent parts, only a sample of the subsets is tried
PRODUCT_MAX = 64


@dataclass(frozen=True)
class Bind:
    """A directory entry appears (inode) or disappears (None)."""

    directory: str
    entries: tuple[tuple[str, int | None], ...]  # one atomic change: rename has two


@dataclass(frozen=True)
class Write:
    inode: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Flush:
    inode: int


@dataclass(frozen=True)
class FlushDirectory:
    directory: str


@dataclass(frozen=True)
class EmptyCache:
    """The drive wrote its whole cache to the medium."""


@dataclass(frozen=True)
class Acknowledge:
    """The program reported this revision as durable to its caller."""

    revision: int


Op = Bind | Write | Flush | FlushDirectory | EmptyCache | Acknowledge
Tree = dict[str, bytes]


@dataclass
class Trace:
    """Operations in order; a directory is an inode, bound in the root, named ''."""

    ops: list[Op] = field(default_factory=list)
    inodes: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    names: dict[tuple[str, str], int] = field(default_factory=dict)  # as the running system sees

    def create(self, directory: str, name: str) -> int:
        inode = next(self.inodes)
        self._bind(directory, (name, inode))
        return inode

    def rename(self, directory: str, old: str, new: str) -> None:
        self._bind(directory, (old, None), (new, self.names[directory, old]))

    def move(self, old: tuple[str, str], new: tuple[str, str]) -> None:
        """Rename between directories, each of which persists its half independently."""
        inode = self.names[old]
        self._bind(new[0], (new[1], inode))
        self._bind(old[0], (old[1], None))

    def overwrite(self, name: str, offset: int, data: bytes) -> None:
        """Damage a file as a drive does: permanently and unnoticed by the program."""
        inode = self.names[tuple(name.split("/"))]
        self.ops += [Write(inode, offset, data), Flush(inode), EmptyCache()]

    def unlink(self, directory: str, name: str) -> None:
        self._bind(directory, (name, None))

    def _bind(self, directory: str, *entries: tuple[str, int | None]) -> None:
        for name, inode in entries:
            if inode is None:
                self.names.pop((directory, name), None)
            else:
                self.names[directory, name] = inode
        self.ops.append(Bind(directory, entries))

    def acknowledge(self, revision: int) -> None:
        self.ops.append(Acknowledge(revision))

    def acknowledged(self, upto: int) -> int:
        """Return the revision acknowledged by the first `upto` operations."""
        done = [op.revision for op in self.ops[:upto] if isinstance(op, Acknowledge)]
        return max(done, default=0)

    def crash_states(self, upto: int) -> Iterator[Tree]:
        """Yield each tree of files that may exist if power fails after `upto` operations.

        If the drive loses its cache, the tree is that of an earlier operation: it is yielded only
        if something was acknowledged since, as it was yielded for that operation otherwise.
        """
        emptied = [i for i, op in enumerate(self.ops[:upto]) if isinstance(op, EmptyCache)]
        promised = self.acknowledged(upto)
        for kept in range(emptied[-1] + 1 if emptied else 0, upto + 1):
            if kept == upto or self.acknowledged(kept) < promised:
                yield from self._states(self.ops[:kept])

    def _states(self, ops: list[Op]) -> Iterator[Tree]:
        """Yield the possible contents of a drive that wrote everything flushed."""
        directories = sorted({op.directory for op in ops if isinstance(op, Bind)})
        spaces = [_directory_states(ops, directory) for directory in directories]
        contents: dict[int, list[bytes]] = {}
        for chosen in itertools.product(*spaces):
            found = dict(zip(directories, chosen, strict=True))
            files = {
                f"{directory}/{name}".lstrip("/"): inode
                for directory, entries in found.items()
                if not directory or directory in found.get("", {})
                for name, inode in entries.items()
                if directory or name not in directories
            }
            for inode in files.values():
                if inode not in contents:
                    contents[inode] = _file_states(ops, inode)
            for data in _choices([contents[inode] for inode in files.values()]):
                yield dict(zip(files, data, strict=True))


def _choices(options: list[list[bytes]]) -> Iterator[tuple[bytes, ...]]:
    """Combine one option for each file; if there are too many, vary one file at a time."""
    if prod(map(len, options)) <= PRODUCT_MAX:
        yield from itertools.product(*options)
        return
    whole = [max(states, key=lambda state: (len(state), state)) for states in options]
    for i, states in enumerate(options):
        yield from ((*whole[:i], state, *whole[i + 1 :]) for state in states)


def _subsets(items: list) -> list[tuple]:
    if len(items) <= SUBSETS_MAX:
        return [c for n in range(len(items) + 1) for c in itertools.combinations(items, n)]
    cuts = [tuple(items[:n]) for n in range(len(items) + 1)]
    one_out = [tuple(items[:n] + items[n + 1 :]) for n in range(len(items))]
    return cuts + one_out + [(item,) for item in items]


def _directory_states(ops: list[Op], directory: str) -> list[dict[str, int]]:
    """List the possible contents of a directory: flushed changes, and any of the others."""
    flushed = max((i for i, op in enumerate(ops) if op == FlushDirectory(directory)), default=-1)
    changes = [
        (i, op) for i, op in enumerate(ops) if isinstance(op, Bind) and op.directory == directory
    ]
    sure = [op for i, op in changes if i < flushed]
    states: dict[tuple, dict[str, int]] = {}
    for others in _subsets([op for i, op in changes if i > flushed]):
        entries: dict[str, int | None] = {}
        for op in (*sure, *others):
            entries.update(op.entries)
        state = {name: inode for name, inode in sorted(entries.items()) if inode is not None}
        states[tuple(state.items())] = state
    return list(states.values())


def _file_states(ops: list[Op], inode: int) -> list[bytes]:
    """List the possible contents of a file: flushed writes, and any pages of the others."""
    flushed = max((i for i, op in enumerate(ops) if op == Flush(inode)), default=-1)
    sure, others = bytearray(), []
    for i, op in enumerate(ops):
        if not isinstance(op, Write) or op.inode != inode:
            continue
        if i < flushed:
            _apply(sure, op.offset, op.data)
        else:
            others += [
                (op.offset + at, op.data[at : at + PAGE_BYTES])
                for at in range(0, len(op.data), PAGE_BYTES)
            ]
    states = set()
    end = max([len(sure), *(at + len(data) for at, data in others)])
    torn = [(at, data[: len(data) // 2]) for at, data in others[-1:]]
    for pages in [*_subsets(others), (*others[:-1], *torn)]:
        state = bytearray(sure)
        for at, data in pages:
            _apply(state, at, data)
        states |= {bytes(state), bytes(state) + bytes(end - len(state))}
    return sorted(states)


def _apply(content: bytearray, offset: int, data: bytes) -> None:
    content.extend(bytes(max(0, offset + len(data) - len(content))))
    content[offset : offset + len(data)] = data


SOUND = ("create", "write", "flush", "rename", "flush directory")


class CrashDisk:
    """A Disk in memory that publishes by the given steps and traces its operations."""

    def __init__(
        self,
        steps: tuple[str, ...] = SOUND,
        files: Tree | None = None,
        *,
        empties_cache: bool = True,
    ) -> None:
        self.steps = steps
        self._empties_cache = empties_cache
        self.trace = Trace()
        self.files: Tree = files if files is not None else {}  # as the running system sees them
        self._directories: set[str] = set()
        self._serial = itertools.count()

    def recover(self) -> int:
        temps = [name for name in self.files if name.rpartition("/")[2].startswith(".tmp-")]
        return sum(self.files.pop(name) is not None for name in temps)

    def publish(self, name: str, parts) -> None:
        self.publish_ordered(name, parts)
        self._empty_cache()

    def publish_ordered(self, name: str, parts) -> None:
        directory, _, leaf = name.rpartition("/")
        if directory not in self._directories:
            self._directories.add(directory)
            self.trace.create("", directory)
            self.trace.ops.append(FlushDirectory(""))
        in_place = "rename" not in self.steps
        temp = leaf if in_place else f".tmp-{next(self._serial)}"
        data = b"".join(bytes(part) for part in parts)
        inode = 0
        for step in self.steps:
            if step == "create":
                inode = self.trace.create(directory, temp)
            elif step == "write":
                self.trace.ops.append(Write(inode, 0, data))
            elif step == "flush":
                self.trace.ops.append(Flush(inode))
            elif step == "rename":
                self.trace.rename(directory, temp, leaf)
            elif step == "flush directory":
                self.trace.ops.append(FlushDirectory(directory))
        self.files[name] = data

    def _empty_cache(self) -> None:
        if self._empties_cache:
            self.trace.ops.append(EmptyCache())

    def read(self, name: str, limit_bytes: int) -> bytes:
        raw = self._find(name)
        if len(raw) > limit_bytes:
            message = "over the limit"
            raise CorruptDataError(message)
        return raw

    def opened(self, name: str):
        self._find(name)
        return nullcontext(OpenedFile(self, name))

    def read_into(self, name: str, offset: int, buffers) -> int:
        raw, start = self._find(name), offset
        for buffer in buffers:
            data = raw[offset : offset + len(buffer)]
            buffer[: len(data)] = data
            offset += len(data)
        return offset - start

    def _find(self, name: str) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(name)
        return self.files[name]

    def size_bytes(self, name: str) -> int:
        return len(self._find(name))

    def list_names(self, directory: str) -> list[str]:
        names = [name.removeprefix(f"{directory}/") for name in self.files]
        return sorted(name for name in names if "/" not in name and name[0] != ".")

    def remove_leftovers(self) -> None:
        return

    def remove(self, name: str) -> bool:
        return self.remove_all([name]) == 1

    def remove_all(self, names) -> int:
        existed = [name for name in names if self.files.pop(name, None) is not None]
        for name in existed:
            self.trace.unlink(*name.split("/"))
        self.trace.ops += [FlushDirectory(d) for d in {name.split("/")[0] for name in existed}]
        if existed:
            self._empty_cache()
        return len(existed)

    def quarantine(self, name: str, reason: str) -> None:
        leaf = f"{name.rpartition('/')[2]}.{reason.replace(' ', '-')}"
        self.files[f"quarantine/{leaf}"] = self.files.pop(name)
        old = tuple(name.split("/"))
        if old in self.trace.names:
            if "quarantine" not in self._directories:
                self._directories.add("quarantine")
                self.trace.create("", "quarantine")
                self.trace.ops.append(FlushDirectory(""))
            self.trace.move(old, ("quarantine", leaf))
            self.trace.ops += [FlushDirectory(old[0]), FlushDirectory("quarantine")]

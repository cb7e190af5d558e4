"""Listing of a node's folder, without opening files or following links."""

import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from node.store.descriptors import OPEN_DIRECTORY, closing

_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class Entry:
    """Directory entry, with its `lstat` result."""

    directory: str  # "" for the root
    leaf: str
    mode: int
    owner: int
    size_bytes: int

    @property
    def name(self) -> str:
        """The name from the folder's root; "." for the root itself."""
        return f"{self.directory}/{self.leaf}" if self.directory else self.leaf

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_exposed(self) -> bool:
        """Return whether another user owns it or has any permission on it."""
        if stat.S_ISLNK(self.mode):
            return False  # a link's own mode has no effect
        return bool(self.mode & _OTHERS) or self.owner != os.geteuid()


def scan_folder(root: Path, inside: Collection[str]) -> Iterator[Entry]:
    """Yield the root, its entries, and those of the directories named in `inside`."""
    with closing(os.open(root, os.O_RDONLY | os.O_DIRECTORY)) as opened:
        yield _entry("", ".", os.fstat(opened))
        for entry in _list_entries(opened, ""):
            yield entry
            if entry.is_directory and entry.leaf in inside:
                with closing(os.open(entry.leaf, OPEN_DIRECTORY, dir_fd=opened)) as inner:
                    yield from _list_entries(inner, entry.leaf)


def make_private(root: Path, entry: Entry) -> None:
    """Remove other users' permissions from one of our entries; raise OSError."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with closing(os.open(root / entry.directory / entry.leaf, flags)) as opened:
        os.fchmod(opened, 0o700 if entry.is_directory else 0o600)


def _list_entries(directory: int, name: str) -> Iterator[Entry]:
    with os.scandir(directory) as entries:
        leaves = sorted(entry.name for entry in entries)
    for leaf in leaves:
        yield _entry(name, leaf, os.stat(leaf, dir_fd=directory, follow_symlinks=False))


def _entry(directory: str, leaf: str, status: os.stat_result) -> Entry:
    return Entry(directory, leaf, status.st_mode, status.st_uid, status.st_size)

"""Files of scenario runs, compared and copied: journals by what was appended, others as a whole."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fabric.errors import RejectedError
from router.limits import SHADOW_BYTES_MAX

JOURNAL = ".jsonl"
_FILE_MODE = 0o600


@dataclass(frozen=True, slots=True)
class FileState:
    """Length of a file's copy, and when the original last changed."""

    size_bytes: int
    changed_ns: int


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Content of a file from `offset` to its end, or to the end of one answer's room."""

    path: str
    offset: int
    state: FileState  # of the original, as far as this piece goes
    data: bytes = field(repr=False)


class RunFiles:
    """Folder of runs; every method blocks on the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def news(self, known: Mapping[str, FileState]) -> tuple[list[FilePiece], list[str], bool]:
        """Return new pieces, removed files, and whether there are more."""
        pieces: list[FilePiece] = []
        left_bytes, found = SHADOW_BYTES_MAX, set()
        for path, state in self._states():
            found.add(path)
            before = known.get(path)
            if before == state:
                continue
            if left_bytes <= 0:
                return pieces, [], True
            piece = self._piece(path, before, state, left_bytes)
            if piece is not None:
                left_bytes -= len(piece.data)
                pieces.append(piece)
        return pieces, [path for path in known if path not in found], False

    def _states(self) -> Iterator[tuple[str, FileState]]:
        for path in sorted(self._folder.glob("*/*")):
            with suppress(OSError):  # removed since it was listed
                stat = path.stat()
                if not path.name.startswith("."):
                    name = f"{path.parent.name}/{path.name}"
                    yield name, FileState(stat.st_size, stat.st_mtime_ns)

    def _piece(
        self, path: str, before: FileState | None, state: FileState, limit_bytes: int
    ) -> FilePiece | None:
        offset = 0
        if path.endswith(JOURNAL) and before is not None and before.size_bytes <= state.size_bytes:
            offset = before.size_bytes
        try:
            with (self._folder / path).open("rb") as file:
                file.seek(offset)
                size_bytes = state.size_bytes - offset
                is_cut = path.endswith(JOURNAL) and size_bytes > limit_bytes
                data = file.read(min(size_bytes, limit_bytes) if is_cut else size_bytes)
        except OSError:
            return None
        changed_ns = 0 if is_cut else state.changed_ns
        return FilePiece(path, offset, FileState(offset + len(data), changed_ns), data)

    def take(self, piece: FilePiece) -> None:
        """Store a piece durably; raise OSError, or RejectedError for a path outside the folder."""
        path = self._place(piece.path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if piece.offset or piece.path.endswith(JOURNAL):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
            with os.fdopen(descriptor, "r+b") as file:
                file.truncate(piece.offset)
                file.seek(piece.offset)
                file.write(piece.data)
                file.flush()
                os.fsync(file.fileno())
            return
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE)
        with os.fdopen(descriptor, "wb") as file:
            file.write(piece.data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def drop(self, name: str) -> None:
        """Remove a copy of a file that is gone; raise OSError or RejectedError."""
        path = self._place(name)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other files are left
            path.parent.rmdir()

    def _place(self, name: str) -> Path:
        folder, _, leaf = name.partition("/")
        if not folder.isalnum() or not leaf or "/" in leaf or leaf.startswith("."):
            message = "a run's file has the name of its folder and its own"
            raise RejectedError(message, code="invalid_message")
        return self._folder / folder / leaf

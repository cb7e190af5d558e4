"""Text files that a scenario names, read only from the folder of its file."""

import os
import stat
from pathlib import Path, PurePosixPath

from fabric.errors import NotFoundError, RejectedError, TooLargeError
from router.limits import SCENARIO_BYTES_MAX, SCENARIO_FILE_BYTES_MAX, SCENARIO_FILES_MAX
from router.scenario.diagnostics import shorten
from router.scenario.reader import read_scenario
from router.scenario.scenario import Scenario


def read_scenario_file(path: Path) -> Scenario:
    """Return a scenario with the texts that it names; raise ScenarioError with all errors."""
    return read_scenario(scenario_bytes(path), path.name, ScenarioFolder(path.parent))


def scenario_bytes(path: Path) -> bytes:
    """Return the bytes of a scenario file; raise NotFoundError, or TooLargeError."""
    try:
        return _bytes_of(path, SCENARIO_BYTES_MAX)
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise NotFoundError(message) from None


class ScenarioFolder:
    """Reader of text files in one folder; names cannot lead out of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.texts: dict[str, str] = {}  # all that were read, by name

    def __call__(self, name: str) -> str:
        if name not in self.texts:
            if len(self.texts) == SCENARIO_FILES_MAX:
                message = f"more than {SCENARIO_FILES_MAX} files; join some of them"
                raise TooLargeError(message)
            self.texts[name] = self._read(name)
        return self.texts[name]

    def _read(self, name: str) -> str:
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name:
            message = f"'{shorten(name)}' leads out of the scenario's folder; put the file into it"
            raise RejectedError(message)
        try:
            path = (self._folder / pure).resolve(strict=True)
            if not path.is_relative_to(self._folder):
                message = f"'{shorten(name)}' is a link out of the scenario's folder; copy the file"
                raise RejectedError(message)
            return _bytes_of(path, SCENARIO_FILE_BYTES_MAX).decode("utf-8-sig")
        except UnicodeDecodeError:
            message = f"'{shorten(name)}' is not UTF-8 text; save it as UTF-8"
            raise RejectedError(message) from None
        except (OSError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or "a circle of links"
            message = f"'{shorten(name)}' cannot be read: {why}"
            raise NotFoundError(message) from None


def _bytes_of(path: Path, bytes_max: int) -> bytes:
    """Return a file's bytes up to a limit, without waiting for pipes or devices."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            message = f"'{path.name}' is not a regular file"
            raise RejectedError(message)
        raw = file.read(bytes_max + 1)
    if len(raw) > bytes_max:
        message = f"'{path.name}' has more than {bytes_max:,} bytes; make it shorter"
        raise TooLargeError(message)
    return raw

"""Source of a scenario: its YAML text, its folder's text files, and the variables of a run."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from fabric.codec import dump_json
from fabric.errors import NotFoundError, RejectedError, TooLargeError
from router.limits import (
    SCENARIO_BYTES_MAX,
    SCENARIO_FILE_BYTES_MAX,
    SCENARIO_FILES_MAX,
    SCENARIO_TEXT_CHARS_MAX,
)
from router.scenario.diagnostics import shorten, suggest
from router.scenario.reader import no_files, read_scenario
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


_FOLDER = Path(__file__).parent / "shipped"
_FILE_NAME = "scenario.yaml"  # shown in errors of a text that was sent without a name
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ScenarioSource:
    """Complete input of a scenario's reader, independent of the folder that it came from."""

    yaml: str
    files: dict[str, str] = field(default_factory=dict)  # texts by the names in the YAML
    variables: dict[str, str] = field(default_factory=dict)  # values that replace the defaults

    def read(self) -> Scenario:
        """Return the scenario; raise ScenarioError with all errors, or RejectedError."""
        scenario = read_scenario(self.yaml.encode(), _FILE_NAME, self._file)
        return with_variables(scenario, self.variables)

    def _file(self, name: str) -> str:
        return self.files[name] if name in self.files else no_files(name)

    @property
    def digest(self) -> str:
        """Digest of the whole source: a journal belongs to one digest."""
        parts = [self.yaml, dict(sorted(self.files.items())), dict(sorted(self.variables.items()))]
        return blake2b(dump_json(parts), digest_size=_DIGEST_BYTES).hexdigest()


def shipped_source(name: str, variables: Mapping[str, str]) -> ScenarioSource:
    """Return a shipped scenario's source; raise NotFoundError for an unknown name."""
    return file_source(shipped_file(name), variables)


def file_source(path: Path, variables: Mapping[str, str]) -> ScenarioSource:
    """Return a file's source; raise NotFoundError, or ScenarioError with all errors."""
    raw, folder = scenario_bytes(path), ScenarioFolder(path.parent)
    read_scenario(raw, path.name, folder)  # collects the texts that the file names
    return ScenarioSource(raw.decode("utf-8-sig"), folder.texts, dict(variables))


def with_variables(scenario: Scenario, values: Mapping[str, str]) -> Scenario:
    """Return a scenario with other variables; raise RejectedError for an unknown name."""
    for name, text in values.items():
        param = f"set.{shorten(name)}"
        if name not in scenario.variables:
            message = f"'{shorten(name)}' is not a variable; {suggest(name, scenario.variables)}"
            raise RejectedError(message, code="invalid_value", param=param)
        if len(text) > SCENARIO_TEXT_CHARS_MAX:
            message = f"{param} is longer than {SCENARIO_TEXT_CHARS_MAX:,} characters"
            raise RejectedError(message, code="invalid_value", param=param)
    return replace(scenario, variables={**scenario.variables, **values})


def shipped_names() -> tuple[str, ...]:
    """Return the names of the shipped scenarios."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


@cache
def shipped_titles() -> Mapping[str, str]:
    """Return the titles of the shipped scenarios by their names."""
    return {name: shipped_scenario(name).title or "" for name in shipped_names()}


def shipped_scenario(name: str) -> Scenario:
    """Read a shipped scenario; raise NotFoundError for an unknown name."""
    return read_scenario_file(shipped_file(name))


def shipped_file(name: str) -> Path:
    """Return the path of a shipped scenario; raise NotFoundError for an unknown name."""
    names = shipped_names()
    if name not in names:
        message = f"'{shorten(name)}' is not a shipped scenario; {suggest(name, names)}"
        raise NotFoundError(message)
    return _FOLDER / f"{name}.yaml"

"""Source of a scenario: its YAML text, the text files that it names, and a run's variables."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from fabric.codec import dump_json
from fabric.errors import NotFoundError, RejectedError
from router.limits import SCENARIO_TEXT_CHARS_MAX
from router.scenario.diagnostics import shorten, suggest
from router.scenario.folder import ScenarioFolder, read_scenario_file, scenario_bytes
from router.scenario.reader import no_files, read_scenario
from router.scenario.scenario import Scenario

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

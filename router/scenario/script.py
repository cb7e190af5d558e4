"""A scenario as text, with the texts that it names and what was chosen for a run of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from fabric.codec import dump_json
from router.scenario.folder import ScenarioFolder, scenario_bytes
from router.scenario.reader import no_files, read_scenario
from router.scenario.scenario import Scenario
from router.scenario.shipped import shipped_file
from router.scenario.variables import with_variables

SOURCE = "scenario.yaml"  # what complaints call a text that came without a name
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Script:
    """All that a scenario is read from, wherever and whenever that is."""

    yaml: str
    files: dict[str, str] = field(default_factory=dict)  # texts that it names
    variables: dict[str, str] = field(default_factory=dict)  # those that are set otherwise

    def read(self) -> Scenario:
        """Read it; raise ScenarioError with all that is wrong, RejectedError for a variable."""
        scenario = read_scenario(self.yaml.encode(), SOURCE, self._file)
        return with_variables(scenario, self.variables)

    def _file(self, name: str) -> str:
        return self.files[name] if name in self.files else no_files(name)

    @property
    def digest(self) -> str:
        """Name all of it: a journal fits no other."""
        told = [self.yaml, dict(sorted(self.files.items())), dict(sorted(self.variables.items()))]
        return blake2b(dump_json(told), digest_size=_DIGEST_BYTES).hexdigest()


def shipped_script(name: str, variables: Mapping[str, str]) -> Script:
    """Return a shipped scenario as text; raise NotFoundError for a name that none has."""
    return script_file(shipped_file(name), variables)


def script_file(path: Path, variables: Mapping[str, str]) -> Script:
    """Return a file as text; raise NotFoundError, or ScenarioError with all that is wrong."""
    raw, folder = scenario_bytes(path), ScenarioFolder(path.parent)
    read_scenario(raw, path.name, folder)  # asks the folder for all texts that it names
    return Script(raw.decode("utf-8-sig"), folder.texts, dict(variables))

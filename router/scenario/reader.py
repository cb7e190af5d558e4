"""Reader of scenarios: from YAML text to a checked scenario, or all its errors."""

from typing import cast

from fabric.errors import NotFoundError
from router.scenario.checks import findings
from router.scenario.diagnostics import Diagnostics, Path
from router.scenario.kinds import FileReader, Reading, Record, Schema
from router.scenario.scenario import Scenario
from router.scenario.yaml_tree import Place, YamlNode, read_tree

_SCENARIO = Record(Scenario)


def no_files(name: str) -> str:
    """Raise NotFoundError for any file of a scenario that was sent without files."""
    message = f"'{name}' cannot be read: this scenario was sent without files"
    raise NotFoundError(message)


def read_scenario(raw: bytes, source: str, files: FileReader = no_files) -> Scenario:
    """Parse and check a scenario; raise ScenarioError with all errors.

    Args:
        raw: the YAML, which may be hostile.
        source: the file's name in errors.
        files: returns the text of a file that the scenario names, or raises RejectedError.
    """
    diagnostics = Diagnostics(source)
    root = read_tree(raw, diagnostics)
    diagnostics.raise_any()
    assert root is not None, "an unreadable text has a diagnostic"
    scenario = cast("Scenario", _SCENARIO.read(root, (), Reading(diagnostics, files)))
    for path, text in findings(scenario):
        if not diagnostics.cover(path):
            diagnostics.add(_place(root, path), path, text)
    diagnostics.raise_any()
    return scenario


def json_schema() -> Schema:
    """Return the JSON schema for editors, made of the same fields as the reader."""
    about = "A macfabric scenario: agents that meet in phases"
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": about}
    return header | _SCENARIO.schema()


def _place(root: YamlNode, path: Path) -> Place:
    """Return the position of a path, or of the nearest part that contains it."""
    node = root
    for part in path:
        value = node.value
        if isinstance(value, dict) and part in value:
            node = value[str(part)]
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            node = value[part]
        else:
            break
    return node.place

"""YAML text into a scenario, or all that is wrong with it."""

from typing import cast

from fabric.errors import NotFoundError
from router.scenario.checks import findings
from router.scenario.complaints import Complaints, Path
from router.scenario.kinds import Reading, Record, Schema, TextFiles
from router.scenario.scenario import Scenario
from router.scenario.yaml_tree import Place, YamlNode, read_tree

_SCENARIO = Record(Scenario)


def no_files(name: str) -> str:
    """Refuse every file: of scenarios that came without a folder."""
    message = f"'{name}' is not to be had: this scenario came without files"
    raise NotFoundError(message)


def read_scenario(raw: bytes, source: str, files: TextFiles = no_files) -> Scenario:
    """Read a scenario; raise ScenarioError with all that is wrong.

    Args:
        raw: the YAML, however hostile.
        source: what complaints call it, a file's name.
        files: returns the text of a file that the scenario names, or raises RejectedError.
    """
    complaints = Complaints(source)
    root = read_tree(raw, complaints)
    complaints.raise_any()
    assert root is not None, "what could not be read was complained about"
    scenario = cast("Scenario", _SCENARIO.read(root, (), Reading(complaints, files)))
    for path, text in findings(scenario):
        if not complaints.concern(path):
            complaints.add(_place(root, path), path, text)
    complaints.raise_any()
    return scenario


def json_schema() -> Schema:
    """Return the schema for editors, made of the same fields."""
    about = "A macfabric scenario: agents that meet in phases"
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": about}
    return header | _SCENARIO.schema()


def _place(root: YamlNode, path: Path) -> Place:
    """Find where a path lies, or else the nearest thing around it."""
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

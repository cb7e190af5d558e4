"""The scenarios that come with macfabric."""

from pathlib import Path

from fabric.errors import NotFoundError
from router.scenario.complaints import meant, told
from router.scenario.folder import read_scenario_file
from router.scenario.scenario import Scenario

_FOLDER = Path(__file__).parent / "shipped"


def shipped_names() -> tuple[str, ...]:
    """Name all of them."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def shipped_file(name: str) -> Path:
    """Return where one of them lies; raise NotFoundError for a name that none has."""
    if name not in shipped_names():
        message = f"'{told(name)}' is no shipped scenario; {meant(name, shipped_names())}"
        raise NotFoundError(message)
    return _FOLDER / f"{name}.yaml"


def shipped_scenario(name: str) -> Scenario:
    """Read one of them."""
    return read_scenario_file(shipped_file(name))

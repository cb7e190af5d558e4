"""Our section of a cluster file."""

from pathlib import Path
from typing import Any

import yaml

from fabric.settings import FabricSettings, parse_settings
from router.cli.errors import MISUSED, CommandError


def read_cluster_file(path: Path) -> dict[str, Any]:
    """Read the whole file as plain data."""
    try:
        whole = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{path}: {error}"
        raise CommandError(message, MISUSED) from None
    if not isinstance(whole, dict):
        message = f"{path} is no cluster file: it holds no keys"
        raise CommandError(message, MISUSED)
    return whole


def our_section(whole: dict[str, Any]) -> object:
    """Return what is below `metadata: {macfabric: …}`, or nothing."""
    metadata = whole.get("metadata")
    return metadata.get("macfabric") if isinstance(metadata, dict) else None


def read_settings(path: Path | None) -> FabricSettings:
    """Return the settings of a cluster file; without one, all defaults."""
    return (
        FabricSettings() if path is None else parse_settings(our_section(read_cluster_file(path)))
    )

"""The cluster file that operators write, and the fabric's own section in it."""

from pathlib import Path
from typing import Any

import yaml

from fabric.errors import RejectedError
from fabric.settings import FabricSettings, parse_settings

_CODE = "invalid_settings"


def read_cluster_file(path: Path) -> dict[str, Any]:
    """Return the whole file; raise OSError, or RejectedError for one that is not valid."""
    try:
        content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        message = f"{path} is not valid YAML: {error}"
        raise RejectedError(message, code=_CODE) from None
    except RecursionError:
        message = f"{path} is nested too deeply"
        raise RejectedError(message, code=_CODE) from None
    if not isinstance(content, dict):
        message = f"{path} is not a cluster file: its top level must be a mapping"
        raise RejectedError(message, code=_CODE)
    return content


def fabric_section(content: dict[str, Any]) -> object:
    """Return the value of `metadata: {macfabric: …}`, or None."""
    metadata = content.get("metadata")
    return metadata.get("macfabric") if isinstance(metadata, dict) else None


def read_settings(path: Path | None) -> FabricSettings:
    """Return the settings in a cluster file, or the defaults where there is no file."""
    return (
        FabricSettings()
        if path is None
        else parse_settings(fabric_section(read_cluster_file(path)))
    )

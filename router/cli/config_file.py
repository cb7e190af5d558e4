"""Our section of a cluster file, and the lines of its settings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fabric.errors import RejectedError
from fabric.hosting import cluster_file
from fabric.hosting.cluster_file import fabric_section
from fabric.settings import FabricSettings, check_keys, parse_settings
from router.cli.errors import MISUSED, CommandError, describe_os_error


def read_cluster_file(path: Path) -> dict[str, Any]:
    """Return the whole file as plain data; raise CommandError for one that is not valid."""
    try:
        return cluster_file.read_cluster_file(path)
    except OSError as error:
        raise CommandError(describe_os_error(error, path), MISUSED) from None
    except RejectedError as error:
        raise CommandError(error.message, MISUSED) from None


def read_settings(path: Path | None) -> FabricSettings:
    """Return the settings of a cluster file, with the keys of its key files; or all defaults."""
    if path is None:
        return FabricSettings()
    return with_key_files(parse_settings(fabric_section(read_cluster_file(path))))


def nodes_expected(path: Path | None, settings: FabricSettings) -> int:
    """Return how many nodes a cluster file names; 0 if it gives no number."""
    if settings.router.nodes_expected or path is None:
        return settings.router.nodes_expected
    provider = read_cluster_file(path).get("provider")
    workers = provider.get("worker_ips") if isinstance(provider, dict) else None
    return 1 + len(workers) if isinstance(workers, list) else 0


def with_key_files(settings: FabricSettings) -> FabricSettings:
    """Add the keys of key files; raise CommandError for a file that others may read."""
    router = settings.router
    whole = replace(
        router,
        api_keys=router.api_keys | _named_in(router.api_keys_file),
        operator_keys=router.operator_keys | _named_in(router.operator_keys_file),
        api_keys_file="",
        operator_keys_file="",
    )
    check_keys(whole)
    return replace(settings, router=whole)


def _named_in(name: str) -> dict[str, str]:
    return keys_of_file(Path(name).expanduser()) if name else {}


def keys_of_file(path: Path) -> dict[str, str]:
    """Read a file of `NAME: KEY`; raise CommandError for one that others may read."""
    keys = read_cluster_file(path)
    if others_may_read(path):
        message = f"{path} holds keys, and others may read it: chmod 600 {path}"
        raise CommandError(message, MISUSED)
    if not all(isinstance(text, str) for pair in keys.items() for text in pair):
        message = f"{path}: expected lines of NAME: KEY, with keys in quotes where they are digits"
        raise CommandError(message, MISUSED)
    return keys


def others_may_read(path: Path) -> bool:
    """Return whether a file's mode gives others any rights."""
    return bool(path.stat().st_mode & 0o077)


def compose(path: Path) -> Any:
    """Return the node tree of a YAML file, with line numbers."""
    return yaml.compose(path.read_text(), yaml.SafeLoader)


def line_of(tree: Any, where: str) -> int | None:
    """Return the line of a setting, or of the nearest one around it; None if there is none."""
    line, rest = None, where
    while rest:
        for name, key, value in _children(tree):
            if rest == name or (rest.startswith(name) and rest[len(name)] in ".["):
                line, tree = key.start_mark.line + 1, value
                rest = rest[len(name) :].removeprefix(".")
                break
        else:
            return line
    return line


def repeated_keys(tree: Any, where: str = "") -> Iterator[tuple[str, int]]:
    """Yield each key that an earlier one of its map shadows, with its line."""
    seen = set()
    for name, key, value in _children(tree):
        path = f"{where}{'' if name.startswith('[') or not where else '.'}{name}"
        if name in seen:
            yield path, key.start_mark.line + 1
        seen.add(name)
        yield from repeated_keys(value, path)


def _children(tree: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, key node and value node of each child."""
    if isinstance(tree, yaml.MappingNode):
        for key, value in tree.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key, value
    elif isinstance(tree, yaml.SequenceNode):
        for at, value in enumerate(tree.value):
            yield f"[{at}]", value, value

"""Line numbers of a YAML file's settings, and keys that occur twice."""

from collections.abc import Iterator
from typing import Any

import yaml


def compose(text: str) -> Any:
    """Return the node tree of a YAML text, with line numbers."""
    return yaml.compose(text, yaml.SafeLoader)


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

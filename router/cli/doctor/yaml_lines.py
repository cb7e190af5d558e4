"""Lines of a YAML file by the paths of what is written there; keys that are written twice."""

from collections.abc import Iterator
from typing import Any

import yaml


def compose(text: str) -> Any:
    """Return the tree of a YAML text with the places of its nodes."""
    return yaml.compose(text, yaml.SafeLoader)


def line_of(tree: Any, where: str) -> int | None:
    """Return the line of a setting, or of the nearest thing around it; None where nothing is."""
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
    """Yield the name, the node that bears it and the value of everything below."""
    if isinstance(tree, yaml.MappingNode):
        for key, value in tree.value:
            if isinstance(key, yaml.ScalarNode):
                yield key.value, key, value
    elif isinstance(tree, yaml.SequenceNode):
        for at, value in enumerate(tree.value):
            yield f"[{at}]", value, value

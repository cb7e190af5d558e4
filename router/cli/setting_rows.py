"""Settings of a fabric with the origin of each value, and without any key."""

import argparse
import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from fabric.codec import to_plain
from fabric.hosting.cluster_file import fabric_section
from fabric.settings import FabricSettings, inspect_settings
from router.cli.config_file import compose, line_of, read_cluster_file
from router.cli.data_folder import DATA_VARIABLE
from router.cli.endpoint import KEY_VARIABLE
from router.cli.errors import CommandError

DEFAULT: Final = "default"
FILE: Final = "file"
KEY_FILE: Final = "key file"
VARIABLE: Final = "environment"
OPTION: Final = "option"
HIDDEN: Final = "set"  # in place of a key
_KEYS: Final = frozenset({"router.api_keys", "router.operator_keys"})
_POLICIES: Final = "router.policies"
# Names of settings and variables whose values are secrets, such as those in a policy's options.
SECRET_NAME: Final = re.compile(r"(?i)key|token|secret|passw|credential|cookie|auth")
_SECTION: Final = "metadata.macfabric"
# Settings that options of `up` and `serve` replace, and the names of those options.
_OPTIONS: Final = (
    ("model", "model"),
    ("data_dir", "data"),
    ("local_nodes", "nodes"),
    ("router.host", "host"),
    ("router.port", "port"),
    ("router.allowed_hosts", "allow_host"),
)


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """Place that a value comes from: a file with a line, a variable, an option, or none."""

    kind: str = DEFAULT
    place: str = ""
    line: int | None = None


@dataclass(frozen=True, slots=True)
class SettingRow:
    """Setting as `config show` prints it."""

    name: str  # such as router.port
    value: Any  # plain data; `set` for a key
    origin: SettingOrigin


def setting_rows(
    settings: FabricSettings, command: str, arguments: argparse.Namespace
) -> tuple[SettingRow, ...]:
    """Return the settings that a command uses with its arguments, and where each comes from."""
    file = _ConfigFile.read(arguments.config)
    chosen = _chosen_origins(command, arguments)
    if not settings.keys_dir and file.origin("keys_dir"):
        chosen["keys_dir"] = SettingOrigin(OPTION, command)  # `up` has its own keys
    written, _ = inspect_settings(file.section)
    key_files = {  # the settings have their keys instead
        "router.api_keys_file": written.router.api_keys_file,
        "router.operator_keys_file": written.router.operator_keys_file,
    }
    rows: list[SettingRow] = []
    for name, value in _leaves(settings, ""):
        if name in _KEYS and value:
            key_file = key_files[f"{name}_file"]
            rows += _key_rows(name, sorted(value), file, key_file, _client_key(command, arguments))
            continue
        plain = key_files.get(name, to_plain(value))
        origin = chosen.get(name) or file.origin(name) or SettingOrigin()
        rows.append(SettingRow(name, _show_value(name, plain), origin))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """A cluster file, and the lines of its settings."""

    path: Path | None
    section: Any
    tree: Any

    @staticmethod
    def read(path: Path | None) -> "_ConfigFile":
        if path is None:
            return _ConfigFile(None, None, None)
        return _ConfigFile(path, fabric_section(read_cluster_file(path)), compose(path))

    def origin(self, name: str) -> SettingOrigin | None:
        """Return the line of a setting; None if the file does not have it."""
        value = self.section
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                return None
            value = value[part]
        return SettingOrigin(FILE, str(self.path), line_of(self.tree, f"{_SECTION}.{name}"))


def _chosen_origins(command: str, arguments: argparse.Namespace) -> dict[str, SettingOrigin]:
    """Return the origins of values that options and variables choose."""
    chosen = {}
    if os.environ.get(DATA_VARIABLE):
        chosen["data_dir"] = SettingOrigin(VARIABLE, DATA_VARIABLE)
    for setting, option in _OPTIONS:
        if getattr(arguments, option, None) not in (None, []):
            spelled = f"{command} --{option.replace('_', '-')}"
            chosen[setting] = SettingOrigin(OPTION, spelled)
    return chosen


def _client_key(command: str, arguments: argparse.Namespace) -> SettingOrigin:
    """Return the origin of keys that are in no file of the settings."""
    if getattr(arguments, "api_key_file", None) is not None:
        return SettingOrigin(KEY_FILE, str(arguments.api_key_file))
    if getattr(arguments, "api_key", None) is not None:
        return SettingOrigin(OPTION, f"{command} --api-key")
    return SettingOrigin(VARIABLE, KEY_VARIABLE)


def _key_rows(
    kind: str, owners: list[str], file: _ConfigFile, key_file: str, elsewhere: SettingOrigin
) -> Iterator[SettingRow]:
    """Yield a row for each key: it is set, and where."""
    in_key_file: Mapping[str, Any] = {}
    if key_file:
        with contextlib.suppress(CommandError):  # it may be on the head alone
            in_key_file = read_cluster_file(Path(key_file).expanduser())
    inline = file.origin(kind)
    for owner in owners:
        name = f"{kind}.{owner}"
        if owner in in_key_file:
            origin = SettingOrigin(KEY_FILE, key_file)
        elif inline is not None and owner in _at(file.section, kind):
            line = line_of(file.tree, f"{_SECTION}.{name}")
            origin = SettingOrigin(FILE, str(file.path), line)
        else:
            origin = elsewhere
        yield SettingRow(name, HIDDEN, origin)


def _at(section: Any, name: str) -> Mapping[str, Any]:
    for part in name.split("."):
        section = section[part]
    return section or {}


def _leaves(settings: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield name and value of every setting, without groups."""
    for each in fields(settings):
        value = getattr(settings, each.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", value


def _show_value(name: str, plain: Any) -> Any:
    return without_secrets(plain, HIDDEN, shows_numbers=True) if name == _POLICIES else plain


def without_secrets(value: Any, shown: str, *, shows_numbers: bool = False) -> Any:
    """Return plain data with `shown` for values with names of secrets.

    Numbers may be shown all the same, as bounds of tokens are named like secrets.
    """
    if isinstance(value, dict):
        return {
            name: shown
            if SECRET_NAME.search(str(name)) and not (shows_numbers and _is_number(inner))
            else without_secrets(inner, shown, shows_numbers=shows_numbers)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [without_secrets(item, shown, shows_numbers=shows_numbers) for item in value]
    return value


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float)

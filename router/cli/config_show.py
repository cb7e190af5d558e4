"""`macfabric config show`: the settings of a fabric, and where each value comes from."""

import argparse
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from fabric.codec import to_plain
from fabric.errors import FabricError
from fabric.hosting.cluster_file import fabric_section
from fabric.ids import DEFAULT_TENANT
from fabric.settings import FabricSettings, parse_settings
from router.cli.config_file import read_cluster_file, with_key_files
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.endpoint import KEY_VARIABLE
from router.cli.errors import MISUSED, CommandError
from router.cli.output import human_bytes
from router.cli.setting_rows import DEFAULT, HIDDEN, setting_rows
from router.cli.terminal import print_error, print_json, print_line
from router.supervise.processes import is_alive

RUNNING, PLANNED = "running", "planned"
_VALUE_COLUMNS: Final = 24  # longer values push their origins to the right
_GAP: Final = "  "


def add_show(verbs: Any) -> None:
    """Declare the command."""
    show = verbs.add_parser(
        "show",
        help="show every setting, and where its value comes from",
        description="Show every setting with its value and where that comes from: the default, "
        "a line of a cluster file, a key file, an environment variable or an option of `up`. "
        "Without FILE, the settings of the fabric that runs in DIR, or if none does, those that "
        "`macfabric up` would use; with FILE, those of a fabric started with it. Keys are never "
        "shown.",
    )
    show.add_argument("config", nargs="?", type=Path, metavar="FILE", help="cluster.yaml")
    show.add_argument("--changed", action="store_true", help="leave out defaults")
    show.add_argument(
        "--data", type=Path, metavar="DIR", help="data folder (default: ~/.macfabric)"
    )
    show.add_argument("--json", action="store_true", help="print JSON")
    show.set_defaults(run=run_show)


def run_show(arguments: argparse.Namespace) -> int:
    """Print the settings."""
    folder = DataFolder((arguments.data or default_data_dir()).expanduser().resolve())
    starter, _ = folder.read_run()
    if arguments.config is None and starter is not None and is_alive(starter):
        source, about = RUNNING, f"settings of the fabric that runs in {folder.path}"
        rows = folder.read_setting_rows()
    else:
        start = f"a start with {arguments.config}" if arguments.config else "`macfabric up`"
        source, about = PLANNED, f"settings that {start} would use"
        rows = _planned_rows(arguments)
    if arguments.changed:
        rows = [row for row in rows if row["origin"]["kind"] != DEFAULT]
    if arguments.json:
        print_json({"source": source, "data": str(folder.path), "settings": rows})
        return 0
    print_error(f"{about}:")
    for line in _lines(rows):
        print_line(line)
    return 0


def _planned_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of a fabric that would be started now."""
    section = None
    if arguments.config is not None:
        section = fabric_section(read_cluster_file(arguments.config))
    try:
        settings = parse_settings(section)
    except FabricError as error:
        raise CommandError(error.message, MISUSED) from None
    try:
        settings = with_key_files(settings)
    except (FabricError, CommandError) as error:  # they may be on the head alone
        print_error(f"warning: the keys of key files are not shown: {error}")
    if os.environ.get(KEY_VARIABLE):
        keys = settings.router.api_keys | {DEFAULT_TENANT: HIDDEN}
        settings = replace(settings, router=replace(settings.router, api_keys=keys))
    return plain_rows(settings, "up", arguments)


def plain_rows(
    settings: FabricSettings, command: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the settings of a command as plain data, in its data folder."""
    folder = (arguments.data or default_data_dir(settings)).expanduser().resolve()
    rows = setting_rows(replace(settings, data_dir=str(folder)), command, arguments)
    return [to_plain(row) for row in rows]


def _lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each setting: its name, its value and the origin of that."""
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        value = _shown_value(row["name"], row["value"])
        yield f"{row['name']:{width}}{_GAP}{value:{_VALUE_COLUMNS}}{_GAP}{_place(row['origin'])}"


def _place(origin: Mapping[str, Any]) -> str:
    if origin["kind"] == DEFAULT:
        return DEFAULT
    line = origin.get("line")
    return f"{origin['place']}:{line}" if line else str(origin["place"])


def _shown_value(name: str, value: Any) -> str:
    """Write a value for people, in a form that a cluster file takes."""
    if value is None:
        return "auto" if name.endswith("_bytes") else "the model's"
    if value in ("", [], {}):
        return "none"
    if isinstance(value, str):
        return value
    if name.endswith(("_bytes", "_bytes_per_s")):
        return human_bytes(value) + ("/s" if name.endswith("_per_s") else "")
    return f"{value:.12g}" if isinstance(value, float) else json.dumps(value, default=str)

"""`macfabric service`: have launchd or systemd run a part of a fabric, from boot or login on."""

import argparse
import contextlib
import getpass
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fabric.errors import FabricError
from fabric.settings import RouterSettings
from router.cli.config_file import read_settings
from router.cli.data_folder import DATA_VARIABLE
from router.cli.errors import MISUSED, CommandError, describe_os_error
from router.cli.output import print_table
from router.cli.service.installed import (
    ROLES,
    UnitFile,
    installed_units,
    remove_unit,
    run_commands,
)
from router.cli.service.unit_files import (
    KINDS,
    LAUNCHD,
    SYSTEMD,
    Unit,
    is_ours,
    text_of,
    unit_name,
)
from router.cli.terminal import print_block, print_error, print_json, print_line
from router.private_files import write_private

STOP_MARGIN_S: Final = 90.0  # in addition to the wait for running turns: saving, and Ray's end
INSTALLED: Final = "installed"
REPLACED: Final = "replaced"
_PATH: Final = "/opt/homebrew/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_SECRET_OPTIONS: Final = ("--api-key", "--key")


def add_service(commands: Any) -> None:
    """Declare the command."""
    service = commands.add_parser(
        "service",
        description="Write, load and remove unit files of launchd (macOS) or systemd (Linux).",
    )
    verbs = service.add_subparsers(metavar="VERB")
    install = _add_verb(
        verbs,
        "install",
        "write a unit and start it, now and at each login or boot",
        "Without --system it belongs to you: launchd starts it when you log in, and so does "
        "systemd unless `loginctl enable-linger` is on. With --system, as root, it starts at boot. "
        "`macfabric service uninstall ROLE` undoes it.",
    )
    install.set_defaults(run=run_install)
    install.add_argument(
        "--no-start", action="store_true", help="only write the file, and start nothing"
    )
    install.add_argument(
        "--force",
        action="store_true",
        help="replace a unit that differs, or that something else wrote",
    )
    uninstall = _add_verb(
        verbs,
        "uninstall",
        "stop a unit and remove its file",
        "What it runs saves everything and stops. Stored agents and keys stay. `macfabric service "
        "install ROLE` undoes it.",
    )
    uninstall.set_defaults(run=run_uninstall)
    show = _add_verb(
        verbs,
        "show",
        "print a unit as it would be written; without ROLE, what is installed",
        "Nothing is changed.",
        needs_role=False,
    )
    show.set_defaults(run=run_show)
    for parser in (install, show):
        parser.add_argument("--user", metavar="NAME", help="with --system: whose account runs it")


def _add_verb(
    verbs: Any, name: str, summary: str, more: str, *, needs_role: bool = True
) -> argparse.ArgumentParser:
    listed = "; ".join(f"{role}: {what}" for role, what in ROLES.items())
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}. {more}",
        epilog=f"{listed}. Arguments of the role's command follow --, as in "
        "macfabric service install up -- --nodes 2",
    )
    nargs = None if needs_role else "?"
    parser.add_argument(
        "role", metavar="ROLE", choices=[*ROLES], nargs=nargs, help=", ".join(ROLES)
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default=LAUNCHD if sys.platform == "darwin" else SYSTEMD,
        help="service manager (default: this system's)",
    )
    parser.add_argument(
        "--system", action="store_true", help="for the whole machine, at boot; needs root"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run_install(arguments: argparse.Namespace) -> int:
    """Write a unit and load it."""
    file, text = _wanted_unit(arguments)
    before = file.read()
    if before not in (None, text) and not arguments.force:
        whose = "with other arguments" if is_ours(before or "") else "by something else"
        message = f"{file.path} was written {whose}: read it, then replace it with --force"
        raise CommandError(message, MISUSED)
    if before is not None and before != text and not arguments.no_start:
        run_commands(file.stop_commands, may_fail=True)
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        write_private(file.path, text)
        if file.is_system:
            file.path.chmod(0o644)
    except OSError as error:
        remedy = " (with --system: run it as root)" if file.is_system else ""
        message = f"{describe_os_error(error, file.path)}{remedy}"
        raise CommandError(message) from None
    if not arguments.no_start:
        run_commands(file.start_commands)
    return _report(arguments, file, INSTALLED if before is None else REPLACED)


def run_uninstall(arguments: argparse.Namespace) -> int:
    """Stop a unit and remove its file."""
    file = UnitFile(arguments.kind, arguments.role, arguments.system)
    text = file.read()
    if text is None:
        return _report(arguments, file, "not installed")
    if not is_ours(text):
        message = f"{file.path} was not written by `macfabric service install`: remove it yourself"
        raise CommandError(message, MISUSED)
    remove_unit(file)
    return _report(arguments, file, "removed")


def run_show(arguments: argparse.Namespace) -> int:
    """Print a unit, or list the installed ones."""
    if arguments.role is None:
        files = installed_units()
        if arguments.json:
            print_json([_row(file) for file in files])
        else:
            print_table("Units", ("role", "kind", "file"), _rows(files))
        return 0
    file, text = _wanted_unit(arguments)
    present = file.read()
    if arguments.json:
        is_current = present == text
        row = {"installed": present is not None, "is_current": is_current, "text": text}
        print_json(_row(file) | row)
        return 0
    print_block(text.rstrip("\n"))
    state = "is not installed"
    if present is not None:
        state = "is installed" if present == text else "is installed with other content"
    print_error(f"{file.path} {state}")
    return 0


def _wanted_unit(arguments: argparse.Namespace) -> tuple[UnitFile, str]:
    """Return the unit that the arguments name, and its text."""
    if arguments.user is not None and not arguments.system:
        message = "--user needs --system: without it the unit is your own"
        raise CommandError(message, MISUSED)
    role, further = arguments.role, list(arguments.further)
    _require_valid(role, further)
    command = (*_program(), *(("ray", "start") if role == "ray" else (role,)), *further)
    environment = {"PATH": _PATH}
    if chosen := os.environ.get(DATA_VARIABLE):
        environment[DATA_VARIABLE] = str(Path(chosen).expanduser().absolute())
    user = arguments.user or os.environ.get("SUDO_USER") or getpass.getuser()
    home = Path(f"~{user}").expanduser() if arguments.system else Path.home()
    if arguments.system:
        environment["HOME"] = str(home)
    unit = Unit(
        role=role,
        command=command,
        folder=Path.cwd(),
        environment=environment,
        stop_s=_stop_s(further),
        log=home / "Library/Logs" / f"{unit_name(role)}.log",
        stays=role != "ray",
        user=user if arguments.system else None,
    )
    file = UnitFile(arguments.kind, role, arguments.system)
    return file, text_of(unit, arguments.kind)


def _require_valid(role: str, further: Sequence[str]) -> None:
    """Raise CommandError for arguments that the role's command would refuse."""
    from router.cli.commands import build_parser

    for option in _SECRET_OPTIONS:
        if any(word == option or word.startswith(f"{option}=") for word in further):
            message = (
                f"{option} would write a key into the unit's file: name a file with --api-key-file"
            )
            raise CommandError(message, MISUSED)
    argv = ["ray", "start", *further] if role == "ray" else [role, *further]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            build_parser(argv).parse_args(argv)
    except SystemExit:
        why = complaint.getvalue().strip().splitlines()
        message = f"`macfabric {' '.join(argv)}` is not valid: {why[-1] if why else 'see its help'}"
        raise CommandError(message, MISUSED) from None


def _program() -> tuple[str, ...]:
    """Return the command of this installation."""
    script = Path(sys.executable).parent / "macfabric"
    return (str(script),) if script.exists() else (sys.executable, "-m", "router.cli.main")


def _stop_s(further: Sequence[str]) -> float:
    """Return how long a stop may take with these arguments."""
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--config", "--autoscaling-config", type=Path)
    config = named.parse_known_args(list(further))[0].config
    try:
        wait_s = read_settings(config.expanduser() if config else None).router.stop_wait_s
    except (CommandError, FabricError):  # it is on another Mac, or is written later
        wait_s = RouterSettings().stop_wait_s
    return wait_s + STOP_MARGIN_S


def _row(file: UnitFile) -> dict[str, Any]:
    return {
        "role": file.role,
        "kind": file.kind,
        "system": file.is_system,
        "file": str(file.path),
        "start": [" ".join(command) for command in file.start_commands],
        "stop": [" ".join(command) for command in file.stop_commands],
    }


def _rows(files: Sequence[UnitFile]) -> list[tuple[str, str, Path]]:
    return [(file.role, file.kind, file.path) for file in files]


def _report(arguments: argparse.Namespace, file: UnitFile, done: str) -> int:
    if arguments.json:
        print_json(_row(file) | {"done": done})
        return 0
    print_line(f"{file.path}: {done}")
    if done not in (INSTALLED, REPLACED):
        return 0
    if arguments.no_start:
        for command in file.start_commands:
            print_line(f"start it with: {' '.join(command)}")
    elif file.kind == SYSTEMD and not file.is_system:
        print_line("it starts when you log in; at boot with: loginctl enable-linger")
    elif file.kind == LAUNCHD and not file.is_system:
        print_line("it starts when you log in; at boot with --system")
    return 0

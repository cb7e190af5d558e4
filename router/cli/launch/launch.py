"""`macfabric launch`: start an agent program that uses the fabric."""

import argparse
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from router.cli.endpoint import KEY_VARIABLE, add_fabric_options, fabric_of
from router.cli.errors import MISUSED, CommandError
from router.cli.launch.programs import PROGRAMS, AgentProgram, LaunchTarget, ProgramStart
from router.cli.terminal import print_error, print_json, print_line
from router.client.client import Fabric

_NO_KEY = "macfabric"  # programs refuse to start without one; a fabric without keys takes any


def add_launch(commands: Any) -> None:
    """Declare the command."""
    names = ", ".join(f"{name} ({client.title})" for name, client in PROGRAMS.items())
    launch = commands.add_parser(
        "launch",
        help="start an agent program on the fabric: claude, codex, opencode, aider, qwen or any",
        description=f"Start an agent program so that it uses the fabric. CLIENT is one of: {names}."
        " Nothing is written to the program's own configuration.",
        epilog="Everything after -- goes to the program: macfabric launch claude -- -p 'hello'",
    )
    launch.add_argument(
        "client", metavar="CLIENT", choices=sorted(PROGRAMS), help="which program to start"
    )
    launch.add_argument("--model", metavar="NAME", help="which model, if several are served")
    launch.add_argument(
        "--print",
        action="store_true",
        dest="prints",
        help="print what it needs, start nothing",
    )
    launch.set_defaults(run=run_launch)
    add_fabric_options(launch)


def split_off(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split a command line at `--` into our arguments and the program's.

    argparse would mix up the options of both.
    """
    if argv[:1] != ["launch"] or "--" not in argv:
        return argv, ()
    end = argv.index("--")
    return argv[:end], argv[end + 1 :]


def run_launch(arguments: argparse.Namespace) -> int:
    """Replace this process by the program, or print its command; raise CommandError without it."""
    client = PROGRAMS[arguments.client]
    fabric = fabric_of(arguments)
    model = _chosen_model(fabric, arguments.model)
    program, *further = _command_line(client, arguments.further)
    is_printed = arguments.prints or arguments.json
    key = fabric.key or _NO_KEY
    if fabric.key and is_printed:  # a terminal's scrollback would keep the key
        key = f"${KEY_VARIABLE}"
        if KEY_VARIABLE not in os.environ:
            print_error(f"note: put the key into {KEY_VARIABLE} first")
    launch = client.configure(LaunchTarget(fabric.url, model, key, _authority(fabric)))
    command = [program, *launch.arguments, *further]
    if arguments.json:
        print_json({"command": command, "environment": dict(launch.environment), "model": model})
        return 0
    if is_printed:
        for line in _shell_lines(command, launch.environment):
            print_line(line)
        return 0
    program_path = shutil.which(program)
    if program_path is None:
        how = f"Install it ({client.install}), or see" if client.install else "See"
        message = f"{program} is not installed here. {how} what it needs with --print."
        raise CommandError(message)
    os.execvpe(program_path, command, _environment(launch))  # noqa: S606 - it is what was asked for
    return 0  # reached only in tests


def _chosen_model(fabric: Fabric, wanted: str | None) -> str:
    """Return the model to use: the wanted one, or the only one."""
    served = sorted(str(row.get("id")) for row in fabric.rows("/v1/models"))
    if not served:
        message = f"no node of {fabric.url} serves a model yet"
        raise CommandError(message)
    if wanted is None and len(served) > 1:
        message = f"choose a model with --model: {', '.join(served)}"
        raise CommandError(message, MISUSED)
    if wanted is not None and wanted not in served:
        message = f"no node serves {wanted!r}; there is: {', '.join(served)}"
        raise CommandError(message, MISUSED)
    return wanted or served[0]


def _command_line(client: AgentProgram, arguments: Sequence[str]) -> list[str]:
    if client.program is not None:
        return [client.program, *arguments]
    if not arguments:
        message = "name the program: macfabric launch any -- python agent.py"
        raise CommandError(message, MISUSED)
    return list(arguments)


def _authority(fabric: Fabric) -> str | None:
    """Return the certificate that the program must trust in addition to the system's."""
    if not fabric.url.startswith("https:"):
        return None
    return next((str(path) for path in fabric.trusted), None)


def _environment(launch: ProgramStart) -> dict[str, str]:
    unset = {name for name, value in launch.environment.items() if not value}
    merged = {**os.environ, **launch.environment}
    return {name: value for name, value in merged.items() if name not in unset}


def _shell_lines(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    own_key = f"${KEY_VARIABLE}"
    lines = []
    for name, value in environment.items():
        if value == own_key:
            if name != KEY_VARIABLE:
                lines.append(f'export {name}="{own_key}"')
        elif value:
            lines.append(f"export {name}={shlex.quote(value)}")
        else:
            lines.append(f"unset {name}")
    return [*lines, shlex.join(command)]

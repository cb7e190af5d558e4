"""`macfabric completion`: scripts for shells, and the answers to their Tab key.

A script runs `macfabric` at each Tab with the command line in the environment (argcomplete's
protocol). The parser of commands is what is completed; a running fabric, if it answers quickly,
supplies the names of agents and nodes.
"""

import argparse
import os
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from argcomplete.completers import BaseCompleter, DirectoriesCompleter, FilesCompleter
from argcomplete.finders import ExclusiveCompletionFinder
from argcomplete.shell_integration import shellcode

from fabric.errors import FabricError
from router.cli.commands import build_parser
from router.cli.data_folder import DataFolder, default_data_dir
from router.cli.endpoint import find_fabric
from router.cli.errors import CommandError
from router.cli.model_choice import bundled_models
from router.cli.terminal import print_block, print_json
from router.client.client import Fabric
from router.client.http_api import ClientError
from router.limits import AGENTS_PAGE_MAX, COMPLETION_S

PROGRAM: Final = "macfabric"
SHELLS: Final = ("bash", "zsh", "fish")
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@+=~/-]*")  # nothing a shell acts on
_LAST_OF_NAMES: Final = "\x7f"  # sorts after every character of a name


def add_completion(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "completion",
        description="Print a script that completes commands, options, files, agents, nodes, "
        "scenarios and benchmarks at the Tab key. Agents and nodes are those of the fabric that "
        f"the command line names, if it answers within {COMPLETION_S:g} s. How to install it: "
        "docs/cli.md, Completion.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that runs the script")
    parser.add_argument("--json", action="store_true", help="print JSON with the script in it")
    parser.set_defaults(run=run_completion)


def run_completion(arguments: argparse.Namespace) -> int:
    """Print a shell's script."""
    shell = arguments.shell
    # bash and zsh run the program as it was typed, fish as the script names it.
    program = shlex.quote(str(Path(sys.executable).with_name(PROGRAM))) if shell == "fish" else None
    script = shellcode(
        [PROGRAM],
        shell=shell,
        complete_arguments=["-o", "nospace"],  # without a match, offer no files
        argcomplete_script=program,
    )
    if arguments.json:
        print_json({"shell": shell, "script": script})
    else:
        print_block(script.strip("\n"))
    return 0


def answer_shell() -> int:
    """Write what may follow the shell's command line, and end the process."""
    words = os.environ.get("COMP_LINE", "").split()[1:]
    parser = build_parser(words)
    _add_completers(parser)
    ExclusiveCompletionFinder()(parser, always_complete_options=False, default_completer=_Nothing())
    return 0


def _add_completers(parser: argparse.ArgumentParser) -> None:
    """Set the completer of each argument by its name in the help."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public list
        if isinstance(action.choices, Mapping):
            for inner in action.choices.values():
                _add_completers(inner)
        completer = _COMPLETERS.get(str(action.metavar))
        if completer is not None:
            setattr(action, "completer", completer)  # noqa: B010 - argcomplete's, not argparse's


class _Nothing(BaseCompleter):
    """Completer of values that cannot be guessed."""

    def __call__(self, **_: Any) -> Iterable[str]:
        return ()


def _agents(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Yield ids of agents from `prefix` on, a page of them."""
    before = f"{prefix[:-1]}{chr(ord(prefix[-1]) - 1)}{_LAST_OF_NAMES}" if prefix else None
    after = {} if before is None else {"after": before}
    return _names(parsed_args, lambda fabric: fabric.agents(AGENTS_PAGE_MAX, **after), "id")


def _nodes(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    """Yield names of nodes; without a fabric, of those that have stored something here."""
    return _names(parsed_args, lambda fabric: fabric.nodes(), "name") or _stored_nodes(parsed_args)


def _stored_nodes(parsed_args: argparse.Namespace) -> list[str]:
    folder = DataFolder((getattr(parsed_args, "data", None) or default_data_dir()).expanduser())
    return [path.name for path in (folder.path / "nodes").glob("*") if path.is_dir()]


def _models(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    return _names(parsed_args, lambda fabric: fabric.rows("/v1/models"), "id")


def _runs(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    return _names(parsed_args, lambda fabric: fabric.rows("/v1/scenarios"), "id")


def _benchmarks(**_: Any) -> Iterable[str]:
    from router.cli.bench import benchmark_names

    return benchmark_names()


def _scenarios(**context: Any) -> Iterable[str]:
    from router.scenario.source import shipped_names

    return (*shipped_names(), *FilesCompleter(["yaml", "yml"])(**context))


def _model_folders(**context: Any) -> Iterable[str]:
    return (*bundled_models(), *DirectoriesCompleter()(**context))


def _names(
    arguments: argparse.Namespace, ask: Callable[[Fabric], list[dict[str, Any]]], field: str
) -> list[str]:
    """Return a field of the rows that a fabric answers with; nothing if it takes too long."""
    found: list[str] = []

    def look_up() -> None:
        options = (getattr(arguments, name, None) for name in ("url", "data", "key"))
        try:
            rows = ask(replace(find_fabric(*options), timeout_s=COMPLETION_S))
        except (ClientError, CommandError, FabricError, OSError, ValueError):
            return  # completion cannot show errors
        names = (row.get(field) for row in rows)
        found.extend(n for n in names if isinstance(n, str) and _PLAIN_NAME.fullmatch(n))

    # In a thread: the look-up of a host's name has no time limit.
    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(COMPLETION_S)
    return list(found)


_COMPLETERS: Final[Mapping[str, Callable[..., Iterable[str]]]] = MappingProxyType(
    {
        "AGENT": _agents,
        "BENCHMARK": _benchmarks,
        "DIR": DirectoriesCompleter(),
        "FILE": FilesCompleter(),
        "FILE|NAME": _scenarios,
        "FOLDER": DirectoriesCompleter(),
        "ID": _agents,
        "MODEL": _models,
        "NODE": _nodes,
        "PATH": FilesCompleter(),
        "PATH|NAME": _model_folders,
        "RUN": _runs,
    }
)

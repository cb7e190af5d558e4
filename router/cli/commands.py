"""All `macfabric` commands: their groups, their modules, and their parser."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import fabric
from router.cli.errors import MISUSED
from router.cli.terminal import is_error_stream, print_block, print_error


@dataclass(frozen=True, slots=True)
class Command:
    """Command: its line in the help, and the function below `router.cli` that declares it."""

    name: str
    place: str
    summary: str


_VERBS: Final = "agent_verbs.add_agent_verbs"

GROUPS: Final[Mapping[str, tuple[Command, ...]]] = MappingProxyType(
    {
        "run a fabric on this machine": (
            Command("up", "up.add_up", "start a fabric and stay in the foreground"),
            Command("down", "up.add_down", "stop the fabric that `up` started, also after a crash"),
            Command(
                "demo", "demo.demo.add_demo", "show what a fabric does, and leave nothing behind"
            ),
            Command(
                "service",
                "service.service.add_service",
                "let launchd or systemd start a part of the fabric",
            ),
            Command(
                "uninstall",
                "uninstall.add_uninstall",
                "remove what macfabric has written on this machine",
            ),
        ),
        "use a fabric": (
            Command("launch", "launch.add_launch", "start an agent program on the fabric"),
            Command("chat", "chat.add_chat", "talk to an agent in the terminal"),
            Command("scenario", "scenario.scenario.add_scenario", "run scenarios of many agents"),
            Command("completion", "completion.add_completion", "print a script for the Tab key"),
        ),
        "inspect a fabric": (
            Command("status", "queries.add_queries", "show whether a fabric runs, and its health"),
            Command("nodes", "queries.add_queries", "list the nodes"),
            Command(
                "agents", "queries.add_queries", "list the agents and how their last turns matched"
            ),
            Command("agent", "queries.add_queries", "show one agent"),
            Command("top", "top.top.add_top", "watch Macs, agents, moves and events"),
            Command("usage", "usage.add_usage", "show what tenants' turns used"),
            Command(
                "events",
                "events.add_events",
                "follow what happens to agents, moves, nodes and links",
            ),
            Command(
                "logs",
                "logs.add_logs",
                "show what router and nodes on this machine have logged",
            ),
        ),
        "move, keep and remove agents": (
            Command("migrate", _VERBS, "move an agent to another node"),
            Command("fork", _VERBS, "make a new agent with the context of another one"),
            Command("replicate", _VERBS, "keep a copy of an agent on another node"),
            Command("prefetch", _VERBS, "load an agent ahead of its turn"),
            Command("pin", _VERBS, "make an agent the last to be evicted"),
            Command("decay", _VERBS, "evict an agent early, at once or later"),
            Command("close", _VERBS, "drop a finished agent from RAM, and evict it first"),
            Command("share", _VERBS, "choose which agents may reuse an agent's memory"),
            Command("evict", _VERBS, "drop an agent from RAM, or a copy of it from disk"),
            Command(
                "hibernate", "hibernate.add_hibernation", "write an agent into one signed file"
            ),
            Command("resume", "hibernate.add_hibernation", "bring an agent back from its file"),
            Command("backup", "backup.backup.add_backup", "save the fabric's keys and all agents"),
            Command("restore", "backup.restore.add_restore", "bring agents back from a backup"),
            Command("erase", _VERBS, "remove every byte of an agent, everywhere"),
        ),
        "edit what agents remember": (
            Command(
                "direct", "directives.add_direct", "edit parts of an agent's history, or undo that"
            ),
            Command("supersede", _VERBS, "mark a tool result as replaced by a later one"),
            Command("rebuild", _VERBS, "recompute an agent's memory after edits, at its next turn"),
        ),
        "nodes": (
            Command("drain", "drain.add_drain", "empty a node before its lid closes"),
            Command("undrain", "drain.add_drain", "let a node take agents again"),
            Command("upgrade", "upgrade.add_upgrade", "restart all with the installed code"),
            Command(
                "fsck", "fsck.add_fsck", "check the stored agents of stopped nodes, and repair them"
            ),
        ),
        "run a fabric of several Macs": (
            Command(
                "config",
                "doctor.config_check.add_config",
                "check a cluster file, and show the settings of a fabric",
            ),
            Command("certs", "certs.add_certs", "make or renew the keys of a fabric's members"),
            Command(
                "serve", "serve.add_serve", "serve on an existing Ray cluster, as cluster.yaml does"
            ),
            Command(
                "ray", "ray_start.add_ray_start", "start Ray on this Mac, as cluster.yaml does"
            ),
            Command(
                "router",
                "routers.add_routers",
                "run a second router, which takes over if the first fails",
            ),
            Command(
                "voter",
                "routers.add_routers",
                "run a third voter, with which two Macs can elect a router",
            ),
            Command("promote", "routers.add_routers", "make a standby the active router by hand"),
        ),
        "check and measure": (
            Command(
                "doctor",
                "doctor.doctor.add_doctor",
                "check this machine, and explain the paths between the nodes",
            ),
            Command("bench", "bench.add_bench", "measure this machine against stated limits"),
            Command(
                "simulate",
                "simulate.add_simulate",
                "compare policies of placement on a modelled fleet",
            ),
            Command(
                "support-bundle",
                "support.bundle.add_support_bundle",
                "collect files for a maintainer",
            ),
        ),
    }
)
COMMANDS: Final[Mapping[str, Command]] = MappingProxyType(
    {command.name: command for group in GROUPS.values() for command in group}
)


# Hints for commands of other servers.
ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "pull": "Models are folders: docs/models.md, Get a model, names the tool.",
        "run": "`macfabric chat` talks to an agent, `macfabric up` starts a fabric.",
        "ps": "`macfabric nodes` lists the nodes and their models, `macfabric agents` the agents.",
        "list": "`macfabric agents` lists the agents, `macfabric nodes` nodes and models.",
        "rm": "`macfabric erase` removes an agent, `macfabric uninstall` the installation.",
        "get": "`macfabric nodes`, `agents`, `agent ID` and `events` show what there is.",
        "describe": "`macfabric agent ID` and `agents --why ID` describe an agent.",
    }
)


def build_parser(argv: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return a parser with the command of `argv` in full, and only the names of others.

    All modules together take about a second to load; without `argv`, all are loaded.
    """
    parser = _RootParser(
        prog="macfabric",
        description="A fabric of Macs that gives LLM agents a persistent, movable KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"macfabric {fabric.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    named = [word for word in argv or () if not word.startswith("-")][:1]
    wanted = {
        command.place for command in COMMANDS.values() if argv is None or command.name in named
    }
    for command in COMMANDS.values():
        if command.name in commands.choices:
            continue
        if command.place in wanted:
            module, function = command.place.rsplit(".", 1)
            getattr(import_module(f"router.cli.{module}"), function)(commands)
        else:
            commands.add_parser(command.name)
    return parser


_USED: Final = "used_parser"  # argument with the parser of the command itself


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser whose commands have a description, and which suggests similar ones."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", "parsers", _Commands)

    def add_subparsers(self, **options: Any) -> Any:
        """Declare commands; without one, the parser prints its help as wrong usage."""
        self.set_defaults(run=self._run_without_command)
        return super().add_subparsers(parser_class=CommandParser, **options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; reject unknown options with the usage of their command."""
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            used: CommandParser = getattr(arguments, _USED, self)
            used.error(f"unrecognized arguments: {' '.join(unknown)}{used.hint(unknown)}")
        return arguments

    def hint(self, unknown: Sequence[str]) -> str:
        """Return a sentence with options that resemble the unknown ones, if there are any."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = [
            match
            for word in unknown
            if word.startswith("--")
            for match in get_close_matches(word.partition("=")[0], known, n=1)
        ]
        return f". Did you mean {' and '.join(near)}?" if near else ""

    def _run_without_command(self, _: argparse.Namespace) -> int:
        print_error(self.format_help().rstrip("\n"))
        return MISUSED

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, versions and errors; argparse has no public hook for that."""
        write = print_error if is_error_stream(file) else print_block
        write(message.rstrip("\n"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject an unknown command with suggestions; argparse would list all commands."""
        if isinstance(action, _Commands) and value not in action.choices:
            near = get_close_matches(str(value), list(action.choices), n=3)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"See `{self.prog} --help`."
            if isinstance(self, _RootParser):
                hint = ELSEWHERE.get(str(value), hint)
            raise argparse.ArgumentError(None, f"there is no {self.prog} {value!r}. {hint}")
        super()._check_value(action, value)


class _RootParser(CommandParser):
    """Parser of all commands, whose help lists them in groups."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        options = [action for action in self._actions if action.option_strings]
        lines = {command.name: _line(command) for command in COMMANDS.values()}
        sections = {name: [lines[each.name] for each in group] for name, group in GROUPS.items()}
        for title, actions in {**sections, "options": options}.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text("`macfabric COMMAND --help` describes a command in full.")
        return formatter.format_help()


def _line(command: Command) -> argparse.Action:
    """Return a command's line of the help, in the form that argparse aligns."""
    return argparse.Action([], dest=command.name, metavar=command.name, help=command.summary)


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001 - no public name
    """Subparsers that use a command's summary as the description in its own help."""

    def add_parser(self, name: str, **options: Any) -> CommandParser:
        command = COMMANDS.get(name)
        summary = options.setdefault("help", command.summary if command else None)
        if summary:
            options.setdefault("description", f"{summary[0].upper()}{summary[1:]}.")
        parser: CommandParser = super().add_parser(name, **options)
        parser.set_defaults(**{_USED: parser})
        return parser

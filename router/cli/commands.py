"""Parser of all `macfabric` commands."""

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

import fabric
from router.cli.terminal import is_error_stream, print_block, print_error

# The function that declares each command. A command line that begins with a command's name loads
# that module alone: all of them together take about a second.
_AGENT_VERBS: Final = (
    *("migrate", "fork", "replicate", "prefetch", "pin", "decay"),
    *("close", "share", "evict", "supersede", "rebuild", "erase"),
)
DECLARATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "up": "up.add_up",
        "down": "up.add_down",
        "serve": "serve.add_serve",
        "ray": "ray_start.add_ray_start",
        **dict.fromkeys(("router", "voter", "promote"), "routers.add_routers"),
        "launch": "launch.add_launch",
        **dict.fromkeys(("status", "nodes", "agents", "agent"), "queries.add_queries"),
        "events": "events.add_events",
        **dict.fromkeys(_AGENT_VERBS, "agent_verbs.add_agent_verbs"),
        "direct": "directives.add_direct",
        **dict.fromkeys(("drain", "undrain"), "drain.add_drain"),
        **dict.fromkeys(("hibernate", "resume"), "hibernate.add_hibernation"),
        "scenario": "scenario.scenario.add_scenario",
        "doctor": "doctor.doctor.add_doctor",
        "fsck": "fsck.add_fsck",
        "config": "doctor.config_check.add_config",
        "certs": "certs.add_certs",
        "demo": "demo.demo.add_demo",
        "bench": "bench.add_bench",
        "simulate": "simulate.add_simulate",
    }
)


def build_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Declare the command that `argv` begins with, or every command if it begins with none."""
    parser = CommandParser(
        prog="macfabric",
        description="A fabric of Macs that gives LLM agents a persistent, movable KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"macfabric {fabric.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    command = DECLARATIONS.get(argv[0]) if argv else None
    for place in dict.fromkeys([command] if command else DECLARATIONS.values()):
        module, function = place.rsplit(".", 1)
        getattr(import_module(f"router.cli.{module}"), function)(commands)
    return parser


class CommandParser(argparse.ArgumentParser):
    """ArgumentParser whose commands have a description."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", "parsers", _Commands)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, versions and errors; argparse has no public hook for that."""
        write = print_error if is_error_stream(file) else print_block
        write(message.rstrip("\n"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Reject an unknown command with suggestions; argparse would list all commands."""
        if isinstance(action, _Commands) and value not in action.choices:
            near = get_close_matches(str(value), list(action.choices), n=3)
            known = f"Did you mean {' or '.join(near)}?" if near else f"See `{self.prog} --help`."
            raise argparse.ArgumentError(None, f"there is no {self.prog} {value!r}. {known}")
        super()._check_value(action, value)


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001 - no public name
    """Subparsers that use a command's summary as the description in its own help."""

    def add_parser(self, name: str, **options: Any) -> CommandParser:
        summary = options.get("help")
        if summary:
            options.setdefault("description", f"{summary[0].upper()}{summary[1:]}.")
        parser: CommandParser = super().add_parser(name, **options)
        return parser

"""Parser of all `macfabric` commands."""

import argparse
from difflib import get_close_matches
from typing import Any

import fabric
from router.cli.agent_verbs import add_agent_verbs
from router.cli.bench import add_bench
from router.cli.certs import add_certs
from router.cli.demo.demo import add_demo
from router.cli.directives import add_direct
from router.cli.doctor.config_check import add_config
from router.cli.doctor.doctor import add_doctor
from router.cli.drain import add_drain
from router.cli.events import add_events
from router.cli.fsck import add_fsck
from router.cli.hibernate import add_hibernation
from router.cli.launch import add_launch
from router.cli.queries import add_queries
from router.cli.ray_start import add_ray_start
from router.cli.scenario.scenario import add_scenario
from router.cli.serve import add_serve
from router.cli.terminal import is_error_stream, print_block, print_error
from router.cli.up import add_down, add_up


def build_parser() -> argparse.ArgumentParser:
    """Declare every command."""
    parser = CommandParser(
        prog="macfabric",
        description="A fabric of Macs that gives LLM agents a persistent, movable KV cache.",
    )
    parser.add_argument("--version", action="version", version=f"macfabric {fabric.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for declare in (
        *(add_up, add_down, add_serve, add_ray_start, add_launch, add_queries, add_events),
        *(add_agent_verbs, add_direct, add_drain, add_hibernation, add_scenario),
        *(add_doctor, add_fsck, add_config, add_certs, add_demo, add_bench),
    ):
        declare(commands)
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

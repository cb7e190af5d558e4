"""The command line's parser: help that is never empty, and errors that suggest what was meant."""

import argparse
from difflib import get_close_matches
from typing import Any

from router.cli.terminal import is_error_stream, print_block, print_error


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose commands describe themselves."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("action", "parsers", _Commands)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help, versions and errors; argparse has no public place for that."""
        write = print_error if is_error_stream(file) else print_block
        write(message.rstrip("\n"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse an unknown command; argparse would list all of them."""
        if isinstance(action, _Commands) and value not in action.choices:
            near = get_close_matches(str(value), list(action.choices), n=3)
            known = f"Did you mean {' or '.join(near)}?" if near else f"See `{self.prog} --help`."
            raise argparse.ArgumentError(None, f"there is no {self.prog} {value!r}. {known}")
        super()._check_value(action, value)


class _Commands(argparse._SubParsersAction):  # type: ignore[type-arg]  # noqa: SLF001 - no public name
    """Commands whose line in the list of commands describes them in their own help as well."""

    def add_parser(self, name: str, **options: Any) -> CommandParser:
        summary = options.get("help")
        if summary:
            options.setdefault("description", f"{summary[0].upper()}{summary[1:]}.")
        parser: CommandParser = super().add_parser(name, **options)
        return parser

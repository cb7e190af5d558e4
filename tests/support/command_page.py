"""The page of all commands and options, docs/commands.md, as their parser describes them.

`make reference` writes it; tests/test_reference_docs.py holds the committed page to the parser.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from router.cli.commands import build_parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
HEAD = """\
# Commands and options

Every command of `macfabric` with all of its options, as `macfabric COMMAND --help` describes them.
[cli.md](cli.md) is the overview. `make reference` writes this page from the parser; do not edit it.

## Options of most commands
A command that asks a running fabric also takes these; the last line of its entry names them.
"""
SHARED = ("--url", "--data", "--key", "--json")
SHOWN_BY = "status"  # a command with all shared options


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command, without those that only group subcommands."""
    return dict(_leaves(build_parser(), ""))


def _leaves(
    parser: argparse.ArgumentParser, name: str
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        yield name, parser
    for choices in (action.choices for action in inner):
        for word, each in choices.items():
            yield from _leaves(each, f"{name} {word}".strip())


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Return all spellings of a parser's options."""
    return {spelling for action in parser._actions for spelling in action.option_strings}


def command_page() -> str:
    """Return the whole page."""
    parsers = commands()
    shared = {row for row in _rows(parsers[SHOWN_BY]) if row[0] in SHARED}
    parts = [HEAD + _table("option", sorted(shared, key=lambda row: SHARED.index(row[0])))]
    for name, parser in parsers.items():
        own_rows = [row for row in _rows(parser) if row not in shared]
        also = [f"`{row[0]}`" for row in _rows(parser) if row in shared]
        lines = [f"## `{name}`", _escaped(parser.description or ""), ""]
        lines += [_table("argument or option", own_rows)] if own_rows else []
        lines += [f"Also {', '.join(also)}.", ""] if also else []
        parts.append("\n".join(lines))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


Row = tuple[str, str, str]  # its last spelling, all spellings with the value, its description


def _rows(parser: argparse.ArgumentParser) -> list[Row]:
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        names = action.option_strings or [formatter._format_args(action, action.dest)]
        value = ""
        if action.option_strings and action.nargs != 0:
            value = f" {_value(action)}"
        shown = f"`{', '.join(names)}{value}`"
        meaning = formatter._expand_help(action) if action.help else ""
        rows.append((names[-1], shown, meaning))
    return rows


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _table(title: str, rows: list[Row]) -> str:
    lines = [f"| {title} | meaning |", "|---|---|"]
    lines += [f"| {_escaped(shown)} | {_escaped(meaning)} |" for _, shown, meaning in rows]
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(command_page())

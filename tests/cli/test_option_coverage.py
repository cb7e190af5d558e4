"""Every option of every command is written in some test."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from router.cli.commands import build_parser

TESTS = Path(__file__).resolve().parents[1]
ANYWHERE = {"--help", "--version"}


def options_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, inner in action.choices.items():
                yield from options_of(inner, f"{name} {word}".strip())
        long = [option for option in action.option_strings if option.startswith("--")]
        yield from ((name, option) for option in long[:1] if option not in ANYWHERE)


def test_every_option_is_used_by_a_test():
    sources = [p.read_text("utf-8") for p in TESTS.rglob("*.py") if p != Path(__file__)]
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", "\n".join(sources)))
    options = list(options_of(build_parser()))
    assert len(options) > 200, "the parser's options were not found"
    assert [f"{name} {option}" for name, option in options if option not in used] == []

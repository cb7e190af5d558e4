"""Confirmation of what cannot be undone: a word that is typed on a terminal."""

import argparse
import sys
from typing import Final

from router.cli.errors import MISUSED, CommandError
from router.cli.terminal import errors_are_terminal, input_is_terminal, print_error

YES: Final = "yes"  # to be typed


def add_confirmation(parser: argparse.ArgumentParser) -> None:
    """Declare `--yes`."""
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask; without a terminal, nothing is asked either",
    )


def confirm_loss(action: str, *, is_confirmed: bool) -> None:
    """Ask before an action that cannot be undone, unless a program runs the command.

    Raise CommandError if it is not confirmed.
    """
    if not is_confirmed and input_is_terminal() and errors_are_terminal():
        _require_word(YES, action)


def require_typed(word: str, action: str) -> None:
    """Ask for a typed word; raise CommandError for anything else, or without a terminal."""
    if not input_is_terminal():
        message = "nothing is removed without a confirmation: type it on a terminal, or use --yes"
        raise CommandError(message, MISUSED)
    _require_word(word, action)


def _require_word(word: str, action: str) -> None:
    print_error(f"This cannot be undone. Type {word} to {action}:")
    if sys.stdin.readline().strip() != word:
        message = "not confirmed; nothing was changed"
        raise CommandError(message)

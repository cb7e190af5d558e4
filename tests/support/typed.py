"""Words that a person types into a terminal, for a command in this process."""

import io
import sys

from router.cli import confirmation


class Keyboard(io.StringIO):
    """Standard input of a terminal."""

    def isatty(self):
        return True


def type_words(monkeypatch, words):
    """Let a command find a terminal on which `words` are typed."""
    monkeypatch.setattr(sys, "stdin", Keyboard(words))
    monkeypatch.setattr(confirmation, "errors_are_terminal", lambda: True)

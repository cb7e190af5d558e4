"""Text templates of a scenario: placeholders `${variable}` and `${phase.messages[agent]}`.

A text is parsed once, when its file is read, and rendered by joining its parts. So placeholders in
a model's output or in a variable's value are never expanded.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fabric.errors import TooLargeError
from router.limits import SCENARIO_EXPANDED_CHARS_MAX, SCENARIO_KEY_CHARS_MAX
from router.scenario.diagnostics import shorten

_KEY = rf"[a-z0-9][a-z0-9_-]{{0,{SCENARIO_KEY_CHARS_MAX - 1}}}"
_OPENING = re.compile(r"\$\$\{|\$\{")
_VARIABLE = re.compile(_KEY)
_MESSAGES = re.compile(rf"({_KEY})\.messages\[({_KEY})\]")


class TemplateError(ValueError):
    """Invalid placeholder; the message says what to write."""


@dataclass(frozen=True, slots=True)
class VariablePlace:
    """Placeholder of a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class MessagesPlace:
    """Placeholder of what an agent heard in an earlier phase, from its perspective."""

    phase: str
    agent: str


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """Parsed text; `source` is the author's."""

    parts: tuple[str | VariablePlace | MessagesPlace, ...]
    source: str = ""

    @property
    def places(self) -> Iterator[VariablePlace | MessagesPlace]:
        return (part for part in self.parts if not isinstance(part, str))


def verbatim(text: str) -> TextTemplate:
    """Return a text without placeholders, such as a file's."""
    return TextTemplate((text,), text)


def parse_template(text: str) -> TextTemplate:
    """Return a text's parts; raise TemplateError for an invalid placeholder."""
    parts: list[str | VariablePlace | MessagesPlace] = []
    at = 0
    while match := _OPENING.search(text, at):
        parts.append(text[at : match.start()])
        if match[0] == "$${":
            parts.append("${")
            at = match.end()
            continue
        end = text.find("}", match.end(), match.end() + 4 * SCENARIO_KEY_CHARS_MAX)
        if end < 0:
            message = (
                f"'{shorten(text[match.start() :], 24)}' is not closed; write $${{ to mean ${{"
            )
            raise TemplateError(message)
        parts.append(_place(text[match.end() : end]))
        at = end + 1
    parts.append(text[at:])
    return TextTemplate(tuple(part for part in parts if part != ""), text)


def _place(inside: str) -> VariablePlace | MessagesPlace:
    if _VARIABLE.fullmatch(inside):
        return VariablePlace(inside)
    messages = _MESSAGES.fullmatch(inside)
    if messages:
        return MessagesPlace(messages[1], messages[2])
    expected = "write ${variable} or ${phase.messages[agent]}, or $${ to mean ${"
    message = f"'${{{shorten(inside, 48)}}}' is not a placeholder; {expected}"
    raise TemplateError(message)


def render(
    template: TextTemplate, fill: Callable[[VariablePlace | MessagesPlace], Iterator[str]]
) -> str:
    """Return the filled text without white space at its end; raise TooLargeError.

    Models continue from the last words of a prompt, so trailing white space would matter.
    """
    pieces: list[str] = []
    chars = 0
    for part in template.parts:
        for piece in (part,) if isinstance(part, str) else fill(part):
            chars += len(piece)
            if chars > SCENARIO_EXPANDED_CHARS_MAX:
                limit = f"{SCENARIO_EXPANDED_CHARS_MAX:,}"
                message = f"'{shorten(template.source, 40)}' grows beyond {limit} characters"
                raise TooLargeError(message)
            pieces.append(piece)
    return "".join(pieces).rstrip()

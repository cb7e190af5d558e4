"""Texts of a scenario with places to fill: `${variable}` and `${phase.messages[agent]}`.

A text is cut into parts once, when its file is read. To render it is to join the parts, so nothing
that a model said, or that a variable holds, is ever looked through for places.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fabric.errors import TooLargeError
from router.limits import SCENARIO_EXPANDED_CHARS_MAX, SCENARIO_KEY_CHARS_MAX
from router.scenario.complaints import told

_KEY = rf"[a-z0-9][a-z0-9_-]{{0,{SCENARIO_KEY_CHARS_MAX - 1}}}"
_OPENING = re.compile(r"\$\$\{|\$\{")
_VARIABLE = re.compile(_KEY)
_MESSAGES = re.compile(rf"({_KEY})\.messages\[({_KEY})\]")


class TemplateError(ValueError):
    """A place that is none; the message says what to write."""


@dataclass(frozen=True, slots=True)
class VariablePlace:
    """Placeholder of a variable."""

    name: str


@dataclass(frozen=True, slots=True)
class MessagesPlace:
    """Where goes what an agent heard in an earlier phase, from its perspective."""

    phase: str
    agent: str


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """A text in parts; `source` is as its author wrote it."""

    parts: tuple[str | VariablePlace | MessagesPlace, ...]
    source: str = ""

    @property
    def places(self) -> Iterator[VariablePlace | MessagesPlace]:
        return (part for part in self.parts if not isinstance(part, str))


def verbatim(text: str) -> TextTemplate:
    """Return a text in which nothing is looked for: what a file holds."""
    return TextTemplate((text,), text)


def parse_template(text: str) -> TextTemplate:
    """Cut a text into its parts; raise TemplateError for what is neither text nor a place."""
    parts: list[str | VariablePlace | MessagesPlace] = []
    at = 0
    while found := _OPENING.search(text, at):
        parts.append(text[at : found.start()])
        if found[0] == "$${":
            parts.append("${")
            at = found.end()
            continue
        end = text.find("}", found.end(), found.end() + 4 * SCENARIO_KEY_CHARS_MAX)
        if end < 0:
            message = f"'{told(text[found.start() :], 24)}' is not closed; write $${{ to mean ${{"
            raise TemplateError(message)
        parts.append(_place(text[found.end() : end]))
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
    message = f"'${{{told(inside, 48)}}}' is no place; {expected}"
    raise TemplateError(message)


def render(
    template: TextTemplate, fill: Callable[[VariablePlace | MessagesPlace], Iterator[str]]
) -> str:
    """Join the parts, without the white space at the end; raise TooLargeError for too long a text.

    The end is cut because the last words of a prompt are what a model goes on from.
    """
    pieces: list[str] = []
    chars = 0
    for part in template.parts:
        for piece in (part,) if isinstance(part, str) else fill(part):
            chars += len(piece)
            if chars > SCENARIO_EXPANDED_CHARS_MAX:
                limit = f"{SCENARIO_EXPANDED_CHARS_MAX:,}"
                message = f"'{told(template.source, 40)}' grows beyond {limit} characters"
                raise TooLargeError(message)
            pieces.append(piece)
    return "".join(pieces).rstrip()

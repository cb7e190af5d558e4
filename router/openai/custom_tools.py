"""Custom tools: they take a text, where functions take arguments; a model sees functions with one.

A text that follows a grammar has it as the pattern of that argument, so that it is enforced as a
strict function's are, in each format of calls. Where it can be none, as its rules come round or it
is too long, nodes are told its rules, beside the function.
"""

from dataclasses import dataclass
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.limits import PATTERN_CHARS_MAX
from fabric.turn.generation import ToolCall
from router.http.fields import Fields, refuse, require_text
from router.openai.lark_pattern import NoPatternError, lark_pattern, lark_rules, regex_rules

CUSTOM_INPUT: Final = "input"


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """A custom tool as a function: description and parameters, and what its text has to follow."""

    spelled: dict[str, Any]
    is_strict: bool = False
    rules: str = ""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """How the model is told of it, and the pattern that it comes to, or its rules."""

    told: str
    pattern: str = ""
    rules: str = ""


def custom_function(fields: Fields) -> CustomFunction:
    """Spell a custom tool as a function."""
    description, text = fields.text("description"), {"type": "string"}
    grammar = _grammar(fields)
    if grammar is not None:
        told = grammar.told
        description = told if description is None else f"{description}\n\n{told}"
        text |= {"pattern": grammar.pattern} if grammar.pattern else {}
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: text},
        "required": [CUSTOM_INPUT],
    }
    told_of = {} if description is None else {"description": description}
    rules = grammar.rules if grammar is not None else ""
    return CustomFunction({**told_of, "parameters": parameters}, grammar is not None, rules)


def custom_text(call: ToolCall) -> str:
    """Return the text in the one argument of a custom tool's call, or whatever the model wrote."""
    try:
        found = parse_json(call.arguments)
    except RejectedError:
        return call.arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else call.arguments


def _grammar(fields: Fields) -> _Grammar | None:
    form = fields.object("format")
    if form is None:
        return None
    inner = Fields(form, fields.param("format."))
    kind = require_text(inner.require("type"), inner.param("type"))
    if kind == "text":
        return None
    if kind != "grammar":
        refuse(inner.param("type"), "expected text or grammar")
    nested = inner.object("grammar")  # as chats have it
    inner = inner if nested is None else Fields(nested, inner.param("grammar."))
    definition = require_text(inner.require("definition"), inner.param("definition"))
    syntax = require_text(inner.require("syntax"), inner.param("syntax"))
    if syntax not in ("lark", "regex"):
        refuse(inner.param("syntax"), "expected lark or regex")
    told = f"The input follows this {syntax} grammar:\n{definition}"
    try:
        pattern = lark_pattern(definition) if syntax == "lark" else _unanchored(definition)
        pattern = f"^(?:{pattern})$"
    except NoPatternError:
        pattern = ""
    except ValueError as error:
        refuse(inner.param("definition"), str(error), "invalid_grammar")
    if pattern and len(pattern) <= PATTERN_CHARS_MAX:
        return _Grammar(told, pattern)
    try:
        rules = lark_rules(definition) if syntax == "lark" else regex_rules(_unanchored(definition))
    except ValueError as error:
        refuse(inner.param("definition"), str(error), "invalid_grammar")
    return _Grammar(told, rules=rules)


def _unanchored(pattern: str) -> str:
    """Leave out the anchors around an expression: it is of the whole text in any case."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern

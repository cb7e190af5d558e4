"""Custom tools, which take a text; a model sees them as functions with one argument.

A grammar of the text becomes the pattern of that argument, so that it is enforced as a strict
function's arguments are, in each format of calls. A grammar that is recursive or too long for a
pattern is sent to nodes as rules, beside the function.
"""

from dataclasses import dataclass
from typing import Any, Final, NoReturn

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.limits import PATTERN_CHARS_MAX
from fabric.turn.generation import ToolCall
from fabric.turn.partial_json import whole_members
from router.http.refusals import refuse
from router.http.schema import (
    Nested,
    ObjectOf,
    Tagged,
    Text,
    constant,
    optional,
    param_path,
    required,
    words,
)
from router.openai.lark_pattern import NoPatternError, lark_pattern, lark_rules, regex_rules

CUSTOM_INPUT: Final = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrammar:
    """Grammar that the text of a custom tool follows."""

    definition: str = required(Text())
    syntax: str = required(words("lark", "regex", expected="lark or regex"))
    param: str = param_path()

    @property
    def description(self) -> str:
        """The grammar as part of the tool's description."""
        return f"The input follows this {self.syntax} grammar:\n{self.definition}"

    def enforced(self) -> tuple[str, str]:
        """Return the grammar as a pattern or as rules; the other one is empty."""
        is_lark, definition = self.syntax == "lark", self.definition
        try:
            pattern = lark_pattern(definition) if is_lark else _strip_anchors(definition)
        except NoPatternError:
            pattern = ""
        except ValueError as error:
            self._refuse(error)
        else:
            pattern = f"^(?:{pattern})$"
        if pattern and len(pattern) <= PATTERN_CHARS_MAX:
            return pattern, ""
        try:
            return "", lark_rules(definition) if is_lark else regex_rules(
                _strip_anchors(definition)
            )
        except ValueError as error:
            self._refuse(error)

    def _refuse(self, error: ValueError) -> NoReturn:
        refuse(f"{self.param}.definition", str(error), "invalid_grammar")


# Chats nest the grammar; responses have it flat.
_FORMAT: Final = Tagged(
    {"text": constant(None), "grammar": Nested("grammar", ObjectOf(ToolGrammar))},
    "expected text or grammar",
    "invalid_value",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomTool:
    """Declaration of a custom tool."""

    name: str = required(Text(chars_min=1))
    description: str | None = optional(Text())
    grammar: ToolGrammar | None = optional(_FORMAT, name="format")

    def function(self) -> "CustomFunction":
        """Return the function that a model sees in the tool's place."""
        description, text, rules = self.description, {"type": "string"}, ""
        if self.grammar is not None:
            pattern, rules = self.grammar.enforced()
            rule = (
                f"The input follows this {self.grammar.syntax} grammar:\n{self.grammar.definition}"
            )
            description = rule if description is None else f"{description}\n\n{rule}"
            text |= {"pattern": pattern} if pattern else {}
        parameters = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
        }
        described = {} if description is None else {"description": description}
        declaration = {**described, "parameters": parameters}
        return CustomFunction(declaration, self.grammar is not None, rules)


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """Function in place of a custom tool: description and parameters, and the text's rules."""

    declaration: dict[str, Any]
    is_strict: bool
    rules: str


def custom_text(call: ToolCall) -> str:
    """Return the text of a custom tool's call; the raw arguments if they are malformed.

    Of a broken call it is the text so far.
    """
    if call.is_broken:
        text = whole_members(call.arguments, cuts_text=True).get(CUSTOM_INPUT)
        return text if isinstance(text, str) else ""
    try:
        arguments = parse_json(call.arguments)
    except RejectedError:
        return call.arguments
    text = arguments.get(CUSTOM_INPUT) if isinstance(arguments, dict) else None
    return text if isinstance(text, str) else call.arguments


def _strip_anchors(pattern: str) -> str:
    """Return an expression without the anchors around it: it matches the whole text anyway."""
    pattern = pattern.removeprefix("^")
    escapes = len(pattern) - 1 - len(pattern[:-1].rstrip("\\"))
    return pattern[:-1] if pattern.endswith("$") and escapes % 2 == 0 else pattern

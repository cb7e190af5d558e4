"""Declared tools, and which of them a model may or must call in the form of OpenAI's APIs.

Tools that a vendor runs, such as web search, are left out of the prompt, and listed as ignored.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fabric.turn.answer_constraints import CallChoice, ToolText
from router.api.shared_fields import FLAG_OR_WORD
from router.http.refusals import refuse, require_object, require_text
from router.http.schema import (
    AnyObject,
    ArrayOf,
    Either,
    JsonKind,
    Nested,
    ObjectOf,
    Schema,
    Tagged,
    Text,
    as_sent,
    either,
    only,
    optional,
    param_path,
    refuse_missing,
    required,
    words,
)
from router.http.turn_headers import header_word
from router.limits import TOOLS_MAX


@dataclass(frozen=True, slots=True)
class HostedTool:
    """Declaration of a tool of another type than those that the client runs."""

    type: str
    name: str  # by which a choice of tools may name it

    @property
    def header_type(self) -> str:
        """Type as it is listed in a header of the answer."""
        return header_word(self.type)


@dataclass(frozen=True, slots=True)
class AnyTool:
    """Kind of a tool: one of `kinds` by its type, and a hosted tool of any other type.

    Types in `refused` are refused, and so are unknown types with the field `declares`: only
    functions have it, so the type is probably misspelled.
    """

    kinds: Mapping[str, JsonKind]
    refusal: str = ""
    refused: tuple[str, ...] = ()
    declares: str = ""
    default: str = ""  # type of tools without one

    def read(self, value: Any, param: str) -> Any:
        body = require_object(value, param)
        at = f"{param}.type"
        word = body.get("type") or self.default
        if not word:
            refuse_missing(at)
        kind = self.kinds.get(require_text(word, at))
        if kind is not None:
            return kind.read(body, param)
        if word in self.refused or body.get(self.declares) is not None:
            refuse(at, self.refusal.format(repr(word[:64])), "unsupported_parameter")
        name = body.get("name")
        return HostedTool(word, name if isinstance(name, str) else word)

    def schema(self) -> Schema:
        known = Tagged(self.kinds, default=self.default).schema()
        typed = {"type": "object", "properties": {"type": {"type": "string"}}}
        return either(known, {**typed, "required": ["type"]})


def hosted_types(tools: Iterable[Any]) -> tuple[str, ...]:
    """Return the types of the hosted tools, for the answer's header."""
    return tuple(tool.header_type for tool in tools if isinstance(tool, HostedTool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """Declaration of a function; templates get it as it was sent."""

    name: str = required(Text(chars_min=1))
    description: str | None = optional(Text())
    parameters: dict[str, Any] | None = optional(AnyObject())
    strict: bool = optional(FLAG_OR_WORD, False)
    sent: dict[str, Any] = as_sent()


FUNCTION_TOOL: Final = only("function", ObjectOf(Function))
_FUNCTION_ONLY: Final = AnyTool(
    {"function": FUNCTION_TOOL}, "only functions are called, not {}", ("custom",), "function"
)
FUNCTION_TOOLS: Final = ArrayOf(_FUNCTION_ONLY, TOOLS_MAX)


_NAME: Final = only("name", Text())


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedTool:
    """Tool named by the choice; chats nest the name."""

    type: str = required(words("function", "custom"))
    function: str | None = optional(_NAME)
    custom: str | None = optional(_NAME)
    name: str | None = optional(Text())
    namespace: str | None = optional(Text())
    param: str = param_path()

    def known_name(self, names: Collection[str]) -> str:
        """Return the tool's name; raise RejectedError if it is not one of these."""
        nested = self.function if self.type == "function" else self.custom
        name = self.name if nested is None else nested
        param = f"{self.param}.name" if nested is None else f"{self.param}.{self.type}.name"
        if name is None:
            refuse_missing(param)
        full = name if self.namespace is None else f"{self.namespace}__{name}"
        if full not in names:
            refuse(param, f"there is no tool {name[:64]!r} in 'tools'")
        return full


_RECORD: Final = ObjectOf(_NamedTool)
_NAMED: Final = AnyTool({"function": _RECORD, "custom": _RECORD})


@dataclass(frozen=True, slots=True, kw_only=True)
class _AllowedTools:
    """Tools that may be called, or one of which must be."""

    mode: str = required(words("auto", "required", expected="auto or required"))
    tools: list[_NamedTool | HostedTool] = required(ArrayOf(_NAMED, TOOLS_MAX, 1))
    param: str = param_path()

    def known_names(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the names of the allowed tools without those that run elsewhere."""
        allowed = [tool.known_name(names) for tool in self.tools if isinstance(tool, _NamedTool)]
        if not allowed:
            refuse(f"{self.param}.tools", "it names only hosted tools, which are not run here")
        return tuple(dict.fromkeys(allowed))


_WORDS: Final = words("auto", "none", "required", expected="none, auto, required or an object")
_OBJECT: Final = Tagged(
    {
        "function": _RECORD,
        "custom": _RECORD,
        "allowed_tools": Nested("allowed_tools", ObjectOf(_AllowedTools)),
    },
    "{} is not run here",
)
TOOL_CHOICE: Final = Either({dict: _OBJECT, str: _WORDS}, _WORDS.expected, "invalid_value")
ToolChoice = str | _NamedTool | _AllowedTools


def call_choice(
    choice: ToolChoice | None,
    names: Collection[str],
    *,
    parallel: bool,
    strict: tuple[str, ...] = (),
    texts: tuple[ToolText, ...] = (),
) -> tuple[bool, CallChoice]:
    """Return whether calls are read, and which of the tools `names` may or must be called."""
    takes_one = not parallel
    if choice == "none":
        return False, CallChoice()
    if isinstance(choice, _NamedTool):
        name = choice.known_name(names)
        return True, CallChoice(True, (name,), strict, takes_one=True, texts=texts)
    if isinstance(choice, _AllowedTools):
        must_call = choice.mode == "required"
        return True, CallChoice(must_call, choice.known_names(names), strict, takes_one, texts)
    if choice == "required" and not names:
        refuse(
            "tool_choice",
            "it is only allowed with tools that are run here: functions and custom tools",
        )
    return True, CallChoice(choice == "required", (), strict, takes_one, texts)


def function_choice(
    choice: ToolChoice | None,
    functions: Iterable[Function | HostedTool],
    *,
    parallel: bool,
) -> tuple[bool, CallChoice]:
    """Return the choice among functions."""
    declared = [function for function in functions if isinstance(function, Function)]
    strict = tuple(function.name for function in declared if function.strict)
    return call_choice(
        choice, {function.name for function in declared}, parallel=parallel, strict=strict
    )

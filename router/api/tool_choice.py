"""Tool choice of OpenAI's APIs: declared functions, and which of them a model may or must call."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from fabric.turn.answer_constraints import CallChoice, ToolText
from router.api.hosted_tools import AnyTool, HostedTool
from router.api.shared_fields import FLAG_OR_WORD
from router.http.refusals import refuse
from router.http.schema import (
    AnyObject,
    ArrayOf,
    Either,
    Nested,
    ObjectOf,
    Tagged,
    Text,
    as_sent,
    only,
    optional,
    param_path,
    refuse_missing,
    required,
    words,
)
from router.limits import TOOLS_MAX


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

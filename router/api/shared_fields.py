"""Fields of a turn's body that all dialects share: sampling, template options, answer format."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.settings import (
    BUDGET_OPTION,
    DATES_OPTION,
    EFFORT_OPTION,
    MARKS_OPTION,
    RESERVED_OPTIONS,
    RESTORE_OPTION,
    THINKING_SWITCHES,
)
from fabric.turn.answer_constraints import CallChoice, OutputFormat, OutputKind, schema_format
from fabric.turn.generation import ThoughtLimit
from fabric.turn.schema_keywords import unenforced_keywords
from router.http.refusals import refuse, require_object, require_text, wrong_type
from router.http.schema import (
    AnyObject,
    AnyValue,
    ArrayOf,
    Either,
    Flag,
    Integer,
    Mapped,
    Number,
    ObjectOf,
    Parsed,
    Schema,
    Tagged,
    Text,
    WordIn,
    constant,
    either,
    optional,
    param_path,
    read_whole,
    required,
)
from router.http.turn_headers import header_word
from router.limits import STOP_STRING_CHARS_MAX, STOP_STRINGS_MAX

# A boolean, or the word for it: LM Studio documents `strict` so.
_WORDS: Final = WordIn({"true": True, "false": False}, "a boolean", "invalid_type")
FLAG_OR_WORD: Final = Either({str: _WORDS, bool: Flag()})
SEED: Final = Integer(-(1 << 63), (1 << 64) - 1)
_TOP_P_MIN: Final = 1e-6
_STRINGS: Final = ArrayOf(Text(STOP_STRING_CHARS_MAX, 1), STOP_STRINGS_MAX)
_ANY_STRINGS: Final = ArrayOf(AnyValue(), STOP_STRINGS_MAX)


@dataclass(frozen=True, slots=True)
class TopP(Number):
    """Probability mass to sample from; 0 keeps the most probable token."""

    low: float = 0.0
    high: float = 1.0

    def read(self, value: Any, param: str) -> float:
        return max(_TOP_P_MIN, Number.read(self, value, param))


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """Limit of an answer's tokens; a higher one than any answer may have counts as the highest."""

    low: int = 1
    takes_minus_one: bool = False  # for no limit
    takes_text: bool = False

    def read(self, value: Any, param: str) -> int:
        number = read_whole(value, param, takes_text=self.takes_text)
        if number == -1 and self.takes_minus_one:
            return COMPLETION_TOKENS_MAX
        if number < self.low:
            refuse(param, f"must be at least {self.low}")
        return min(number, COMPLETION_TOKENS_MAX)

    def schema(self) -> Schema:
        low = -1 if self.takes_minus_one else self.low
        number = {"type": "integer", "minimum": low}
        return either(number, {"type": "string"}) if self.takes_text else number


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Strings that end an answer."""

    takes_text: bool = False  # OpenAI's form: also one string, and empty ones are ignored

    def read(self, value: Any, param: str) -> tuple[str, ...]:
        if self.takes_text:
            value = [value] if isinstance(value, str) else value
        items = _ANY_STRINGS.read(value, param)
        texts = tuple(require_text(item, param) for item in items if not self._is_unset(item))
        if not all(1 <= len(text) <= STOP_STRING_CHARS_MAX for text in texts):
            refuse(param, f"each must have between 1 and {STOP_STRING_CHARS_MAX} characters")
        return texts

    def _is_unset(self, item: Any) -> bool:
        return self.takes_text and item == ""

    def schema(self) -> Schema:
        if not self.takes_text:
            return _STRINGS.schema()
        text = Text(STOP_STRING_CHARS_MAX)
        return either(text.schema(), ArrayOf(text, STOP_STRINGS_MAX).schema())


# Templates support three efforts.
_EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def with_effort(options: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Return options with an effort that templates support, unless the client set it there."""
    options = dict(options or {})
    if effort is not None:
        options.setdefault(EFFORT_OPTION, _EFFORTS.get(effort, effort))
    if effort == "none":
        for name in THINKING_SWITCHES:
            options.setdefault(name, False)
    return options


# Tokens of thought; -1 is no limit, whatever the node's settings say.
THOUGHT_TOKENS: Final = TokenLimit(low=0, takes_minus_one=True, takes_text=True)


def with_budget(options: dict[str, Any], tokens: int | None) -> dict[str, Any]:
    """Return options with a budget of thoughts, unless the client set it there."""
    if tokens is None or tokens >= COMPLETION_TOKENS_MAX:
        return options
    return {BUDGET_OPTION: tokens, **options}


def thought_limit(tokens: int | None, effort: str | None) -> ThoughtLimit | None:
    """Return the limit of thoughts of a request that has either, or none."""
    return None if tokens is None and effort is None else ThoughtLimit(tokens, effort)


def _template_options(value: Any, param: str) -> dict[str, Any]:
    options = require_object(value, param)
    for name in options:
        if name in RESERVED_OPTIONS:
            refuse(f"{param}.{name}", "it is reserved for the server")
    for name in (RESTORE_OPTION, DATES_OPTION, MARKS_OPTION):
        flag = options.get(name, True)
        if not isinstance(flag, bool):
            wrong_type(flag, f"{param}.{name}", "a boolean")
    return options


def unenforced_names(
    output: OutputFormat | None, tools: Sequence[Any], calls: CallChoice
) -> tuple[str, ...]:
    """Return the keywords without effect in the schemas that an answer must follow."""
    names: list[str] = []
    if output is not None and output.kind is OutputKind.JSON_SCHEMA:
        found = unenforced_keywords(parse_json(output.source), is_strict=output.is_strict)
        names += [f"json_schema.{name}" for name in found]
    for tool in tools if calls.is_bound else ():
        function = tool["function"]
        if not calls.names or function["name"] in calls.names:
            is_strict = function["name"] in calls.strict
            found = unenforced_keywords(function.get("parameters"), is_strict=is_strict)
            names += [f"tools.{name}" for name in found]
    return tuple(map(header_word, names))


# `chat_template_kwargs`, an extension that all servers of local models have.
TEMPLATE_OPTIONS: Final = Parsed(_template_options, {"type": "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _SchemaFormat:
    name: str | None = optional(Text())
    schema: dict[str, Any] = required(AnyObject())
    strict: bool | None = optional(FLAG_OR_WORD)
    param: str = param_path()


def answer_format(*, is_strict: bool) -> Tagged:
    """Return the kind of a format, with `is_strict` as its default."""
    return Tagged(
        {
            "text": constant(None),
            "json_object": constant(OutputFormat(OutputKind.JSON_OBJECT)),
            "json_schema": Mapped(ObjectOf(_SchemaFormat), partial(_schema_output, is_strict)),
        },
        "expected text, json_object or json_schema",
        "invalid_value",
    )


def _schema_output(is_strict: bool, form: _SchemaFormat) -> OutputFormat:  # noqa: FBT001 - bound above
    is_strict = is_strict if form.strict is None else form.strict
    output = schema_format(form.schema, is_strict=is_strict)
    try:
        output.check()
    except RejectedError as error:
        param = f"{form.param}.schema"
        message = f"Invalid '{param}': {error.message}"
        raise RejectedError(message, code=error.code, param=param) from None
    return output

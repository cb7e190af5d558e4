"""Fields that requests of OpenAI's APIs have in common, with the extensions of local models.

They name the agent, its priority and retention, the sampling and the answer's format.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fabric.limits import CHOICES_MAX, RETAIN_S_MAX
from fabric.sampling_defaults import TOP_K_MAX, chosen_or_built_in
from fabric.turn.answer_constraints import OutputFormat, OutputKind, schema_format
from fabric.turn.generation import Identity, Priority, Sampling
from router.api.adapter import ApiRequest
from router.api.shared_fields import (
    FLAG_OR_WORD,
    SEED,
    THOUGHT_TOKENS,
    StopTexts,
    TokenLimit,
    TopP,
)
from router.http.refusals import kind_of, refuse, require_object
from router.http.schema import (
    AnyObject,
    AnyValue,
    Flag,
    Integer,
    Mapped,
    Number,
    ObjectOf,
    Parsed,
    Tagged,
    Text,
    WordIn,
    constant,
    either,
    only,
    optional,
)
from router.http.turn_headers import identify, priority_of
from router.limits import (
    ANSWERS_PER_PROMPT_MAX,
    KEY_CHARS_MAX,
    LOGIT_BIAS_MAX,
    TOKEN_DIGITS_MAX,
)

COUNT: Final = Integer(1, ANSWERS_PER_PROMPT_MAX, takes_text=True)  # answers to one prompt
_KEY: Final = Text(KEY_CHARS_MAX)
_RETENTION_S: Final = WordIn(
    {"in_memory": 0.0, "in-memory": 0.0, "24h": RETAIN_S_MAX}, "in_memory or 24h"
)
_TIER: Final = WordIn(
    {
        "auto": Priority.INTERACTIVE,
        "default": Priority.INTERACTIVE,
        "flex": Priority.BACKGROUND,
        "priority": Priority.INTERACTIVE,
        "scale": Priority.INTERACTIVE,
    }
)


@dataclass(frozen=True, slots=True)
class OpenAiRequest(ApiRequest):
    """Checked request for chats or completions."""

    include_usage: bool  # a stream ends with the counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Metadata that can name the agent."""

    agent_id: str | None = optional(_KEY)
    user_id: str | None = optional(_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityBody:
    """Fields that name the agent, and the priority and retention of its turn."""

    user: str | None = optional(_KEY)
    prompt_cache_key: str | None = optional(_KEY)
    metadata: Metadata = optional(ObjectOf(Metadata), Metadata())
    service_tier: Priority = optional(_TIER, Priority.INTERACTIVE)
    # How long the client expects to come back.
    retain_s: float = optional(_RETENTION_S, 0.0, "prompt_cache_retention")

    def identity(self, headers: Mapping[str, str]) -> Identity:
        """Return the header's agent, or the field that clients use for one."""
        metadata = self.metadata
        keys = [self.prompt_cache_key, metadata.agent_id, metadata.user_id, self.user]
        return identify(headers, keys)

    def priority(self, headers: Mapping[str, str]) -> Priority:
        """Return the header's priority, or the service tier's."""
        return priority_of(headers, self.service_tier)


STREAM_OPTIONS: Final = only("include_usage", Flag(), False)


def require_stream(include_usage: bool | None, *, stream: bool) -> None:  # noqa: FBT001 - a field
    """Refuse stream_options in a request that is not streamed."""
    if include_usage is not None and not stream:
        refuse("stream_options", "it is only allowed with stream")


_ANY_OBJECT: Final = OutputFormat(OutputKind.JSON_OBJECT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedSchema:
    """JSON schema, as OpenAI has it."""

    name: str | None = optional(Text(KEY_CHARS_MAX))
    description: str | None = optional(Text())
    strict: bool = optional(FLAG_OR_WORD, False)
    schema: Any = optional(AnyValue())

    def output(self) -> OutputFormat:
        if self.schema is None:
            return _ANY_OBJECT
        return schema_format(self.schema, is_strict=self.strict)


_LOOSE_SCHEMA: Final = Mapped(AnyObject(), partial(schema_format, is_strict=False))
RESPONSE_FORMAT: Final = Tagged(
    {
        "text": constant(None),
        "json_object": only("schema", _LOOSE_SCHEMA, _ANY_OBJECT),  # a schema: llama.cpp's way
        "json_schema": only("json_schema", Mapped(ObjectOf(_NamedSchema), _NamedSchema.output)),
    },
    "expected text, json_object or json_schema",
    "invalid_value",
)


def _json(value: Any, param: str) -> OutputFormat:
    if isinstance(value, str):  # some clients send the schema as text
        return OutputFormat(OutputKind.JSON_SCHEMA, value, is_strict=False)
    if not isinstance(value, (dict, bool)):
        refuse(param, f"expected a schema, got {kind_of(value)}", "invalid_type")
    return schema_format(value, is_strict=False)


def _choice(value: Any, param: str) -> OutputFormat:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        refuse(param, "expected a list of strings", "invalid_type")
    if len(value) > CHOICES_MAX:
        refuse(param, f"more than {CHOICES_MAX} items")
    return OutputFormat(OutputKind.CHOICE, json.dumps(value, ensure_ascii=False))


_TEXT: Final = Text().schema()
JSON_FORMAT: Final = Parsed(_json, either(AnyObject().schema(), _TEXT, Flag().schema()))
JSON_OBJECT_FORMAT: Final = Mapped(Flag(), lambda wanted: _ANY_OBJECT if wanted else None)
CHOICE_FORMAT: Final = Parsed(_choice, {"type": "array", "items": _TEXT, "maxItems": CHOICES_MAX})
REGEX_FORMAT: Final = Mapped(Text(), partial(OutputFormat, OutputKind.REGEX))
GRAMMAR_FORMAT: Final = Mapped(Text(), partial(OutputFormat, OutputKind.GRAMMAR))


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """vLLM's extension: at most one of its fields is set."""

    json: OutputFormat | None = optional(JSON_FORMAT)
    json_object: OutputFormat | None = optional(JSON_OBJECT_FORMAT)
    choice: OutputFormat | None = optional(CHOICE_FORMAT)
    regex: OutputFormat | None = optional(REGEX_FORMAT)
    grammar: OutputFormat | None = optional(GRAMMAR_FORMAT)


STRUCTURED_OUTPUTS: Final = ObjectOf(StructuredOutputs)


_BIAS: Final = Number(-100.0, 100.0)
_PENALTY: Final = Number(-2.0, 2.0, takes_text=True)
_SEED: Final = Integer(SEED.low, SEED.high, takes_text=True)
# -1, which other servers' clients send, means no limit.
TOKEN_LIMIT: Final = TokenLimit(takes_minus_one=True, takes_text=True)


def _logit_bias(value: Any, param: str) -> dict[str, float]:
    bias = require_object(value, param)
    if len(bias) > LOGIT_BIAS_MAX:
        refuse(param, f"more than {LOGIT_BIAS_MAX} entries")
    values: dict[str, float] = {}
    for token, number in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) <= TOKEN_DIGITS_MAX):
            refuse(param, "its keys must be token ids")
        values[token] = 0.0 if number is None else _BIAS.read(number, f"{param}.{token}")
    return values


_LOGIT_BIAS: Final = Parsed(
    _logit_bias,
    {
        "type": "object",
        "maxProperties": LOGIT_BIAS_MAX,
        "propertyNames": {"pattern": f"^[0-9]{{1,{TOKEN_DIGITS_MAX}}}$"},
        "additionalProperties": _BIAS.schema(),
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBody(IdentityBody):
    """Fields of chats, completions and responses alike."""

    temperature: float | None = optional(Number(0.0, 2.0, takes_text=True))
    top_p: float | None = optional(TopP(takes_text=True))
    top_k: int | None = optional(Integer(-1, TOP_K_MAX, takes_text=True))
    min_p: float | None = optional(Number(0.0, 1.0, takes_text=True))
    seed: int | None = optional(_SEED)
    stop: tuple[str, ...] = optional(StopTexts(takes_text=True), ())
    logit_bias: dict[str, float] | None = optional(_LOGIT_BIAS)
    repetition_penalty: float | None = optional(Number(0.01, 10.0, takes_text=True))
    frequency_penalty: float | None = optional(_PENALTY)
    presence_penalty: float | None = optional(_PENALTY)
    ignore_eos: bool = optional(Flag(), False)
    response_format: OutputFormat | None = optional(RESPONSE_FORMAT)
    structured_outputs: StructuredOutputs = optional(STRUCTURED_OUTPUTS, StructuredOutputs())
    guided_json: OutputFormat | None = optional(JSON_FORMAT)
    guided_json_object: OutputFormat | None = optional(JSON_OBJECT_FORMAT)
    guided_choice: OutputFormat | None = optional(CHOICE_FORMAT)
    guided_regex: OutputFormat | None = optional(REGEX_FORMAT)
    guided_grammar: OutputFormat | None = optional(GRAMMAR_FORMAT)

    def sampling(self, *, max_tokens: int, logprobs: int | None) -> Sampling:
        """Return how to sample; `max_tokens` and `logprobs` differ between the APIs."""
        values = chosen_or_built_in(self)
        values["top_k"] = max(0, values["top_k"])  # -1 turns it off, as in other servers
        return Sampling(
            max_tokens=max_tokens,
            **values,
            seed=self.seed,
            stop=self.stop,
            logprobs=logprobs,
            logit_bias=self.logit_bias or {},
            ignore_eos=self.ignore_eos,
            output=self._output(),
        )

    def _output(self) -> OutputFormat | None:
        """Return the one format that the request names; raise RejectedError if it names two."""
        outputs = self.structured_outputs
        named = {
            "response_format": self.response_format,
            "guided_json": self.guided_json,
            "structured_outputs.json": outputs.json,
            "guided_json_object": self.guided_json_object,
            "structured_outputs.json_object": outputs.json_object,
            "guided_choice": self.guided_choice,
            "structured_outputs.choice": outputs.choice,
            "guided_regex": self.guided_regex,
            "structured_outputs.regex": outputs.regex,
            "guided_grammar": self.guided_grammar,
            "structured_outputs.grammar": outputs.grammar,
        }
        params = [param for param, output in named.items() if output is not None]
        if not params:
            return None
        if len(params) > 1:
            refuse(params[1], "the answer has a format already")
        output = named[params[0]]
        assert output is not None, "selected"
        output.check()
        return output


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBody(SamplingBody):
    """Fields of chats and responses that limit thoughts, in the spellings of other servers."""

    thinking_budget: int | None = optional(THOUGHT_TOKENS)
    thinking_token_budget: int | None = optional(THOUGHT_TOKENS)  # vLLM
    thinking_budget_tokens: int | None = optional(THOUGHT_TOKENS)  # llama.cpp
    reasoning_budget_tokens: int | None = optional(THOUGHT_TOKENS)

    def thought_tokens(self, tokens: int | None) -> int | None:
        """Return the budget of thoughts that the request has, here or as `tokens`."""
        spellings = (
            self.thinking_budget,
            self.thinking_token_budget,
            self.thinking_budget_tokens,
            self.reasoning_budget_tokens,
            tokens,
        )
        return next((budget for budget in spellings if budget is not None), None)

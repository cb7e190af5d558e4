"""The body of POST /v1/responses: unknown fields are ignored, known ones are checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final

from fabric.ids import TenantId
from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.turn.call_choice import CallChoice
from fabric.turn.messages import Message, MessageRole
from fabric.turn.output_format import OutputFormat
from router.api.adapter import Asked
from router.api.answer_format import answer_format
from router.api.billing_line import ignored_lines, without_billing_lines
from router.api.template_options import template_options, with_effort
from router.api.tool_choice import parse_tool_choice
from router.http.fields import Fields, refuse, require_text, unsupported
from router.http.turn_headers import AGENT_HEADER, expected_next
from router.limits import INCLUDED_MAX, MESSAGE_NAME_CHARS_MAX, TOP_LOGPROBS_MAX
from router.openai.request import parse_identity, parse_priority, parse_retention_s
from router.openai.responses.items import Entry, Reference, conversation, parse_input
from router.openai.responses.tools import Tools, parse_tools
from router.openai.sampling import parse_sampling, tokens_limit
from router.policies.counted_edit import CountedEdit
from router.policies.truncation import Truncation
from router.prompt import Prompt, chat_prompt

_LOGPROBS: Final = "message.output_text.logprobs"
_SEALED: Final = "reasoning.encrypted_content"
_ELSEWHERE: Final = ("conversation", "prompt")  # kept at OpenAI
_WITHOUT_EFFECT: Final = ("context_management", "max_tool_calls", "moderation")
_ECHOED: Final = (
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
    "temperature",
    "top_p",
    "user",
)


@dataclass(frozen=True, slots=True)
class ResponsesRequest(Asked):
    """A checked request, and what its answer and the next request depend on."""

    instructions: str | None
    entries: tuple[Entry, ...]
    given: list[Any] = field(repr=False)  # the input's items, as they came
    tools: Tools
    options: dict[str, Any] = field(repr=False)  # for the template
    previous: str | None
    is_named: bool  # by a header, which outranks whose answer is continued
    reads_calls: bool
    calls: CallChoice
    keeps: bool
    carries_thoughts: bool
    echoed: dict[str, Any] = field(repr=False)  # in the answer, as clients expect
    tenant: TenantId | None = None
    before: tuple[Message, ...] = ()  # what was said up to the previous answer

    @property
    def is_whole(self) -> bool:
        """Whether all that is said is in the request itself."""
        return self.previous is None and not any(isinstance(e, Reference) for e in self.entries)

    def said(self) -> list[Message]:
        """List what is said, in order; no reference may be left."""
        return [*self.before, *(each for each in self.entries if isinstance(each, Message))]

    def full_prompt(self) -> Prompt:
        """Make the prompt of all that is said."""
        said = without_billing_lines(conversation(self.instructions, self.said()))
        prompt = chat_prompt(said, self.tools.functions or None, self.options)
        return replace(prompt, reads_calls=self.reads_calls, calls=self.calls)


def parse_responses(headers: Mapping[str, str], body: dict[str, Any]) -> ResponsesRequest:
    """Check a body; raise RejectedError naming the first parameter that is wrong."""
    fields = Fields(body)
    model = require_text(fields.require("model"), "model")
    entries = parse_input(fields)
    tools = parse_tools(fields)
    reads_calls, calls = parse_tool_choice(fields, tools.names, tools.strict, tools.texts)
    _refuse_unsupported(fields)
    included, options = _included(fields), template_options(fields)
    effort = _effort(fields)
    if effort is not None:
        with_effort(options, effort)
    limit = tokens_limit(fields, "max_output_tokens") or COMPLETION_TOKENS_MAX
    alternatives = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)
    logprobs = (alternatives or 0) if _LOGPROBS in included else None
    given = body["input"]
    asked = ResponsesRequest(
        model=model,
        identity=parse_identity(headers, fields),
        prompt=Prompt(),
        sampling=replace(
            parse_sampling(fields, max_tokens=limit, logprobs=logprobs), output=_format(fields)
        ),
        stream=fields.flag("stream"),
        priority=parse_priority(headers, fields),
        retain_s=parse_retention_s(fields),
        prefetch=expected_next(headers),
        instructions=fields.text("instructions"),
        entries=tuple(entries),
        given=given if isinstance(given, list) else [_user_item(given)],
        tools=tools,
        options=options,
        previous=fields.text("previous_response_id", MESSAGE_NAME_CHARS_MAX),
        is_named=AGENT_HEADER in headers,
        reads_calls=reads_calls,
        calls=calls,
        keeps=fields.raw("store") is None or fields.flag("store"),
        carries_thoughts=_SEALED in included,
        echoed={name: fields.raw(name) for name in _ECHOED} | _echoed(fields, tools, limit),
        ignored=tools.hosted + _ignored(fields),
        own_edits=_truncation(fields, limit),
    )
    for name in ("input", "metadata", "reasoning", "text", "tools"):
        _require_finite(body.get(name), name)
    head = Message(MessageRole.SYSTEM, (asked.instructions or "",))
    asked = replace(asked, ignored=asked.ignored + ignored_lines([head, *asked.said()]))
    return with_prompt(asked) if asked.is_whole else asked


def with_prompt(asked: ResponsesRequest) -> ResponsesRequest:
    """Complete a request of which all is known."""
    return replace(asked, prompt=asked.full_prompt())


def _require_finite(value: Any, param: str) -> None:
    """Refuse numbers such as 1e999: what is sent back must be JSON."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, float) and not isfinite(item):
            refuse(param, "it holds a number that is too large")
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)


def _user_item(text: str) -> dict[str, Any]:
    part = {"type": "input_text", "text": text}
    return {"type": "message", "role": "user", "content": [part]}


def _included(fields: Fields) -> list[str]:
    items = fields.items("include", INCLUDED_MAX) or []
    return [require_text(item, "include") for item in items]


def _effort(fields: Fields) -> str | None:
    reasoning = Fields(fields.object("reasoning") or {}, "reasoning.")
    reasoning.text("summary")
    return reasoning.text("effort", MESSAGE_NAME_CHARS_MAX)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.flag("background"):
        unsupported("background", "answers are waited for, or streamed")
    for name in _ELSEWHERE:
        if fields.raw(name) is not None:
            unsupported(name, "it is kept at OpenAI; send the input itself")
    if fields.raw("truncation") not in (None, "auto", "disabled"):
        refuse("truncation", "expected auto or disabled")
    fields.object("stream_options")


def _format(fields: Fields) -> OutputFormat | None:
    form = Fields(fields.object("text") or {}, "text.").object("format")
    if form is None:
        return None
    return answer_format(Fields(form, "text.format."), strict_by_default=False)


def _ignored(fields: Fields) -> tuple[str, ...]:
    return tuple(name for name in _WITHOUT_EFFECT if fields.raw(name) is not None)


def _truncation(fields: Fields, answer_tokens: int) -> tuple[CountedEdit, ...]:
    is_wanted = fields.raw("truncation") == "auto"
    return (Truncation("truncation", answer_tokens),) if is_wanted else ()


def _echoed(fields: Fields, tools: Tools, limit: int) -> dict[str, Any]:
    return {
        "instructions": fields.raw("instructions"),
        "max_output_tokens": limit if fields.raw("max_output_tokens") is not None else None,
        "metadata": fields.raw("metadata") or {},
        "parallel_tool_calls": fields.raw("parallel_tool_calls") is not False,
        "previous_response_id": fields.raw("previous_response_id"),
        "reasoning": {"effort": None, "summary": None, **(fields.raw("reasoning") or {})},
        "service_tier": fields.raw("service_tier") or "default",
        "store": fields.raw("store") is not False,
        "text": {"format": {"type": "text"}, **(fields.raw("text") or {})},
        "tool_choice": fields.raw("tool_choice") or "auto",
        "tools": tools.given,
        "top_logprobs": fields.raw("top_logprobs") or 0,
        "truncation": fields.raw("truncation") or "disabled",
    }

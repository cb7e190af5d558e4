"""The body of POST /v1/responses: unknown fields are ignored, known ones are checked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Final

from fabric.edit_mode import DISABLED
from fabric.ids import TenantId
from fabric.json_items import ItemCount
from fabric.limits import COMPLETION_TOKENS_MAX, JSON_ITEMS_MAX
from fabric.sampling_defaults import left_out_fields
from fabric.turn.answer_constraints import CallChoice, OutputFormat
from fabric.turn.messages import Message, MessageRole
from router.api.adapter import ApiRequest
from router.api.conversation import ignored_lines, without_billing_lines
from router.api.edit_fields import TRUNCATION
from router.api.shared_fields import (
    TEMPLATE_OPTIONS,
    THOUGHT_TOKENS,
    answer_format,
    thought_limit,
    unenforced_names,
    with_budget,
    with_effort,
)
from router.api.tool_choice import TOOL_CHOICE, ToolChoice, call_choice
from router.http.refusals import refuse, unsupported
from router.http.schema import (
    AnyObject,
    AnyValue,
    ArrayOf,
    Flag,
    Integer,
    ObjectOf,
    Text,
    Unsupported,
    as_sent,
    only,
    optional,
    required,
)
from router.http.turn_headers import AGENT_HEADER, expected_next
from router.limits import INCLUDED_MAX, MESSAGE_NAME_CHARS_MAX, TOP_LOGPROBS_MAX
from router.openai.request import TOKEN_LIMIT, ThinkingBody
from router.openai.responses.items import (
    INPUT,
    Entry,
    InputItem,
    Reference,
    conversation,
    entries_of,
)
from router.openai.responses.tools import TOOLS, ResponsesTool, Tools, tools_of
from router.prompt import Prompt, chat_prompt

_LOGPROBS: Final = "message.output_text.logprobs"
_SEALED: Final = "reasoning.encrypted_content"
_ELSEWHERE: Final = Unsupported("it is kept at OpenAI; send the input itself")
_SUMMARIES: Final = frozenset({"auto", "concise", "detailed"})
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
class ResponsesRequest(ApiRequest):
    """Checked request, and what its answer and the next request depend on."""

    instructions: str | None
    entries: tuple[Entry, ...]
    given: list[Any] = field(repr=False)  # the input's items, as sent
    tools: Tools
    options: dict[str, Any] = field(repr=False)  # for the template
    previous: str | None
    is_named: bool  # by a header, which outranks the agent of the continued response
    reads_calls: bool
    calls: CallChoice
    keeps: bool
    carries_thoughts: bool
    summarizes_thoughts: bool  # their items have them as a summary, and not as content
    echoed: dict[str, Any] = field(repr=False)  # fields that the answer repeats
    tenant: TenantId | None = None
    before: tuple[Message, ...] = ()  # messages up to the end of the previous answer

    @property
    def is_whole(self) -> bool:
        """Whether the request holds the whole conversation."""
        return self.previous is None and not any(isinstance(e, Reference) for e in self.entries)

    def messages(self) -> list[Message]:
        """Return the conversation, in order; references must be resolved."""
        return [*self.before, *(entry for entry in self.entries if isinstance(entry, Message))]

    def full_prompt(self) -> Prompt:
        """Return the prompt of the whole conversation."""
        messages = without_billing_lines(conversation(self.instructions, self.messages()))
        prompt = chat_prompt(messages, self.tools.functions or None, self.options)
        return replace(prompt, reads_calls=self.reads_calls, calls=self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasoning:
    summary: str | None = optional(Text())
    generate_summary: str | None = optional(Text())  # its older name
    effort: str | None = optional(Text(MESSAGE_NAME_CHARS_MAX))
    max_tokens: int | None = optional(THOUGHT_TOKENS)

    @property
    def is_summarized(self) -> bool:
        """Whether summaries of thoughts are requested."""
        return not _SUMMARIES.isdisjoint((self.summary, self.generate_summary))


_TEXT: Final = only("format", answer_format(is_strict=False), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesBody(ThinkingBody):
    """Body of POST /v1/responses."""

    model: str = required(Text())
    input: str | list[InputItem] = required(INPUT)
    tools: list[ResponsesTool] | None = optional(TOOLS)
    tool_choice: ToolChoice | None = optional(TOOL_CHOICE)
    parallel_tool_calls: bool = optional(Flag(), True)
    background: bool = optional(Flag(), False)
    conversation: Any = optional(_ELSEWHERE)
    prompt: Any = optional(_ELSEWHERE)
    truncation: str | None = optional(TRUNCATION)
    stream_options: Any = optional(AnyObject())
    include: list[str] | None = optional(ArrayOf(Text(), INCLUDED_MAX, names_items=False))
    chat_template_kwargs: dict[str, Any] | None = optional(TEMPLATE_OPTIONS)
    reasoning: _Reasoning = optional(ObjectOf(_Reasoning), _Reasoning())
    max_output_tokens: int | None = optional(TOKEN_LIMIT)
    top_logprobs: int = optional(Integer(0, TOP_LOGPROBS_MAX), 0)
    text: OutputFormat | None = optional(_TEXT)
    stream: bool = optional(Flag(), False)
    instructions: str | None = optional(Text())
    previous_response_id: str | None = optional(Text(MESSAGE_NAME_CHARS_MAX))
    store: bool = optional(Flag(), True)
    safety_identifier: Any = optional(AnyValue())
    context_management: Any = optional(AnyValue())
    max_tool_calls: Any = optional(AnyValue())
    moderation: Any = optional(AnyValue())
    sent: dict[str, Any] = as_sent()


RESPONSES_BODY: Final = ObjectOf(ResponsesBody)


def parse_responses(headers: Mapping[str, str], sent: dict[str, Any]) -> ResponsesRequest:
    """Check a body; raise RejectedError naming the first parameter that is wrong."""
    body = RESPONSES_BODY.read(sent)
    argument_items = ItemCount(JSON_ITEMS_MAX)  # of arguments, which are JSON in strings
    tools = tools_of(body.tools or [], sent.get("tools") or [])
    reads_calls, calls = call_choice(
        body.tool_choice,
        tools.names,
        parallel=body.parallel_tool_calls,
        strict=tools.strict,
        texts=tools.texts,
    )
    if body.background:
        unsupported("background", "responses are returned or streamed, not run in the background")
    ignored = tuple(name for name in _WITHOUT_EFFECT if sent.get(name) is not None)
    included = body.include or ()
    limit = body.max_output_tokens or COMPLETION_TOKENS_MAX
    sampling = body.sampling(
        max_tokens=limit, logprobs=body.top_logprobs if _LOGPROBS in included else None
    )
    effort, budget = body.reasoning.effort, body.thought_tokens(body.reasoning.max_tokens)
    thoughts = thought_limit(budget, effort)
    request = ResponsesRequest(
        model=body.model,
        identity=body.identity(headers),
        prompt=Prompt(),
        sampling=replace(sampling, output=body.text, thoughts=thoughts),
        stream=body.stream,
        priority=body.priority(headers),
        retain_s=body.retain_s,
        prefetch=expected_next(headers),
        left_out=left_out_fields(body),
        instructions=body.instructions,
        entries=entries_of(body.input, argument_items),
        given=[_user_item(body.input)] if isinstance(body.input, str) else sent["input"],
        tools=tools,
        options=with_budget(with_effort(body.chat_template_kwargs, effort), budget),
        previous=body.previous_response_id,
        is_named=AGENT_HEADER in headers,
        reads_calls=reads_calls,
        calls=calls,
        keeps=body.store,
        carries_thoughts=_SEALED in included,
        summarizes_thoughts=body.reasoning.is_summarized,
        echoed=_echo_fields(body, tools),
        ignored=tools.hosted + ignored,
        truncation=body.truncation,
    )
    for name in ("input", "metadata", "reasoning", "text", "tools"):
        _require_finite(sent.get(name), name)
    head = Message(MessageRole.SYSTEM, (request.instructions or "",))
    items = () if isinstance(body.input, str) else body.input
    parts = (name for item in items for name in item.ignored)
    lines = ignored_lines([head, *request.messages()])
    if not request.is_whole:  # its prompt is made later, of all that was stored before
        lines += unenforced_names(request.sampling.output, tools.functions, calls)
    request = replace(request, ignored=tuple(dict.fromkeys((*request.ignored, *parts, *lines))))
    return with_prompt(request) if request.is_whole else request


def with_prompt(request: ResponsesRequest) -> ResponsesRequest:
    """Return a request whose conversation is complete with its prompt."""
    return replace(request, prompt=request.full_prompt())


def _require_finite(value: Any, param: str) -> None:
    """Refuse numbers such as 1e999: the response repeats them, and must be JSON."""
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


def _echo_fields(body: ResponsesBody, tools: Tools) -> dict[str, Any]:
    """Return the fields that a response repeats, as clients expect."""
    sent = body.sent
    return {name: sent.get(name) for name in _ECHOED} | {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": sent.get("metadata") or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(sent.get("reasoning") or {})},
        "service_tier": sent.get("service_tier") or "default",
        "store": body.store,
        "text": {"format": {"type": "text"}, **(sent.get("text") or {})},
        "tool_choice": sent.get("tool_choice") or "auto",
        "tools": tools.given,
        "top_logprobs": body.top_logprobs,
        "truncation": body.truncation or DISABLED,
    }

"""The body of POST /v1/chat/completions, and its messages as OpenAI's clients send them.

Unknown fields are ignored, known ones are checked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.json_items import ItemCount
from fabric.limits import COMPLETION_TOKENS_MAX, JSON_ITEMS_MAX, MESSAGES_MAX
from fabric.sampling_defaults import left_out_fields
from fabric.turn.answer_constraints import ToolText
from fabric.turn.messages import Message, MessageRole, ToolUse
from router.api.adapter import AnswerBatch
from router.api.conversation import (
    ignored_lines,
    is_begun,
    refuse_format,
    without_billing_lines,
    without_empty,
)
from router.api.other_content import NO_CONTENT, OTHER_PART, Content, content_kind
from router.api.shared_fields import (
    TEMPLATE_OPTIONS,
    THOUGHT_TOKENS,
    thought_limit,
    with_budget,
    with_effort,
)
from router.api.tool_choice import (
    FUNCTION_TOOL,
    TOOL_CHOICE,
    AnyTool,
    Function,
    HostedTool,
    ToolChoice,
    call_choice,
    hosted_types,
)
from router.http.refusals import refuse
from router.http.schema import (
    AnyObject,
    AnyValue,
    ArrayOf,
    Either,
    Flag,
    Integer,
    ObjectOf,
    Tagged,
    Text,
    Unsupported,
    WordIn,
    only,
    optional,
    required,
)
from router.http.turn_headers import expected_next
from router.limits import MESSAGE_NAME_CHARS_MAX, TOOLS_MAX, TOP_LOGPROBS_MAX
from router.openai.custom_tools import CUSTOM_INPUT, CustomTool
from router.openai.request import (
    COUNT,
    STREAM_OPTIONS,
    TOKEN_LIMIT,
    OpenAiRequest,
    ThinkingBody,
    require_stream,
)
from router.prompt import chat_prompt

_NAME: Final = Text(MESSAGE_NAME_CHARS_MAX)
# Templates have no developer role: OpenAI renamed the system role for its own models only.
_ROLES: Final = {
    "system": MessageRole.SYSTEM,
    "developer": MessageRole.SYSTEM,
    "user": MessageRole.USER,
    "assistant": MessageRole.ASSISTANT,
    "tool": MessageRole.TOOL,
}


_TEXT: Final = only("text", Text())
_PART: Final = Tagged(
    {
        **dict.fromkeys(("text", "input_text", "output_text"), _TEXT),
        "refusal": only("refusal", Text()),
    },
    other=OTHER_PART,
)
_CONTENT: Final = content_kind(Either({str: Text(), dict: _PART}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionUse:
    name: str = required(Text())
    arguments: Any = optional(Either({dict: AnyObject(), str: Text()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionCall:
    function: _FunctionUse = required(ObjectOf(_FunctionUse))
    id: str | None = optional(_NAME)

    def use(self, argument_items: ItemCount) -> ToolUse:
        arguments = _arguments(self.function.arguments, argument_items)
        return ToolUse(self.function.name, arguments, self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CustomUse:
    name: str = required(Text())
    input: str = required(Text())


@dataclass(frozen=True, slots=True, kw_only=True)
class _CustomCall:
    custom: _CustomUse = required(ObjectOf(_CustomUse))
    id: str | None = optional(_NAME)

    def use(self, _argument_items: ItemCount) -> ToolUse:
        return ToolUse(self.custom.name, {CUSTOM_INPUT: self.custom.input}, self.id)


_CALL: Final = Tagged(
    {"function": ObjectOf(_FunctionCall), "custom": ObjectOf(_CustomCall)},
    "functions and custom tools are called",
    default="function",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """Fields of a message in any role."""

    role: MessageRole = required(WordIn(_ROLES))
    function_call: Any = optional(Unsupported("use tool_calls"))
    content: Content = required(_CONTENT)
    name: str | None = optional(_NAME)
    prefix: bool = optional(Flag(), False)  # of the last one: the model continues it

    def message(self, _argument_items: ItemCount) -> Message:
        """Return the message of a turn; `_argument_items` bounds the arguments of all calls."""
        return Message(self.role, self.content.texts, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolResult(ChatMessage):
    tool_call_id: str | None = optional(_NAME)

    def message(self, _argument_items: ItemCount) -> Message:
        texts = self.content.texts
        return Message(self.role, texts, name=self.name, result_of=self.tool_call_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(ChatMessage):
    content: Content = optional(_CONTENT, NO_CONTENT)  # absent where it only called tools
    tool_calls: list[_FunctionCall | _CustomCall] | None = optional(ArrayOf(_CALL, TOOLS_MAX))
    # The reasoning, by any of the names that servers of local models use.
    reasoning_content: str | None = optional(Text())
    reasoning: Any = optional(AnyValue())
    thinking: Any = optional(AnyValue())

    def message(self, argument_items: ItemCount) -> Message:
        thoughts = (self.reasoning_content, self.reasoning, self.thinking)
        return Message(
            self.role,
            self.content.texts,
            name=self.name,
            uses=tuple(call.use(argument_items) for call in self.tool_calls or ()),
            reasoning=next((thought for thought in thoughts if isinstance(thought, str)), None),
        )


_MESSAGE: Final = ObjectOf(ChatMessage)
_RECORDS: Final = dict.fromkeys(_ROLES, _MESSAGE) | {
    "assistant": ObjectOf(_Answer),
    "tool": ObjectOf(_ToolResult),
}
_EXPECTED: Final = f"expected one of {', '.join(_ROLES)}"
MESSAGES: Final = ArrayOf(
    Tagged(_RECORDS, _EXPECTED, "unsupported_value", tag="role"), MESSAGES_MAX, count_min=1
)


def _arguments(arguments: Any, argument_items: ItemCount) -> dict[str, Any] | str:
    """Return arguments as the object that templates iterate over, if they are one."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or not arguments.strip():
        return {}  # what clients send for functions without parameters
    argument_items.feed_whole(arguments)
    try:
        parsed = parse_json(arguments)
    except RejectedError:
        return str(arguments)  # the model's own broken JSON must not stop the conversation
    return parsed if isinstance(parsed, dict) else str(arguments)


_TOOL: Final = AnyTool(
    {"function": FUNCTION_TOOL, "custom": only("custom", ObjectOf(CustomTool))},
    "must be a function or a custom tool, not {}",
    declares="function",
)
_OLD_CALLS: Final = Unsupported("use tools and tool_choice")
_EFFORT: Final = Text(32)
_TEXT_ONLY: Final = "this server answers with text only"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reasoning:
    """OpenRouter's form of the limits of thoughts."""

    effort: str | None = optional(_EFFORT)
    max_tokens: int | None = optional(THOUGHT_TOKENS)
    enabled: bool = optional(Flag(), True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatBody(ThinkingBody):
    """Body of POST /v1/chat/completions."""

    model: str = required(Text())
    messages: list[ChatMessage] = required(MESSAGES)
    tools: list[Function | CustomTool | HostedTool] = optional(ArrayOf(_TOOL, TOOLS_MAX), ())
    tool_choice: ToolChoice | None = optional(TOOL_CHOICE)
    parallel_tool_calls: bool = optional(Flag(), True)
    best_of: Any = optional(Unsupported("use n", (1,), Integer(1, 1).schema()))
    functions: Any = optional(_OLD_CALLS)
    function_call: Any = optional(_OLD_CALLS)
    web_search_options: Any = optional(AnyValue())
    modalities: Any = optional(Unsupported(_TEXT_ONLY, (["text"],)))
    audio: Any = optional(Unsupported(_TEXT_ONLY))
    n: int = optional(COUNT, 1)
    stream: bool = optional(Flag(), False)
    include_usage: bool | None = optional(STREAM_OPTIONS, name="stream_options")
    max_completion_tokens: int | None = optional(TOKEN_LIMIT)
    max_tokens: int | None = optional(TOKEN_LIMIT)
    logprobs: bool = optional(Flag(), False)
    top_logprobs: int | None = optional(Integer(0, TOP_LOGPROBS_MAX))
    continue_final_message: bool = optional(Flag(), False)
    add_generation_prompt: bool | None = optional(Flag())
    chat_template_kwargs: dict[str, Any] | None = optional(TEMPLATE_OPTIONS)
    reasoning_effort: str | None = optional(_EFFORT)
    reasoning: _Reasoning = optional(ObjectOf(_Reasoning), _Reasoning())

    @property
    def effort(self) -> str | None:
        """Reasoning effort, as one of the model's words; None by default."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort
        return self.reasoning.effort if self.reasoning.enabled else "none"

    def logprobs_count(self) -> int | None:
        """Return how many alternatives each token is sent with; None: no log probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            refuse("top_logprobs", "it needs logprobs to be true")
        return (self.top_logprobs or 0) if self.logprobs else None


CHAT_BODY: Final = ObjectOf(ChatBody)


@dataclass(frozen=True, slots=True)
class ChatRequest(OpenAiRequest):
    """Checked request for a chat."""

    custom_tools: frozenset[str]  # names of its tools that take a text


@dataclass(frozen=True, slots=True)
class _ChatTools:
    """Tools of a chat."""

    functions: list[Any]  # as templates get them
    strict: tuple[str, ...]
    custom: frozenset[str]
    texts: tuple[ToolText, ...]
    hosted: tuple[str, ...]  # types of those that run elsewhere


def parse_chat(headers: Mapping[str, str], sent: dict[str, Any]) -> ChatRequest:
    """Check a chat body; raise RejectedError naming the first parameter that is wrong."""
    body = CHAT_BODY.read(sent)
    argument_items = ItemCount(JSON_ITEMS_MAX)  # of arguments, which are JSON in strings
    messages = [message.message(argument_items) for message in body.messages]
    tools = _tools(body.tools, sent.get("tools") or ())
    reads_calls, calls = call_choice(
        body.tool_choice,
        {tool["function"]["name"] for tool in tools.functions},
        parallel=body.parallel_tool_calls,
        strict=tools.strict,
        texts=tools.texts,
    )
    require_stream(body.include_usage, stream=body.stream)
    limit = body.max_completion_tokens or body.max_tokens or COMPLETION_TOKENS_MAX
    sampling = body.sampling(max_tokens=limit, logprobs=body.logprobs_count())
    budget = body.thought_tokens(body.reasoning.max_tokens)
    continues = _continues(body, messages)
    if continues:
        refuse_format(sampling, "response_format", calls)
        messages = without_empty(messages, "messages")
        continues = is_begun(messages, "messages")
    prompt = chat_prompt(
        without_billing_lines(messages),
        tools.functions or None,
        with_budget(with_effort(body.chat_template_kwargs, body.effort), budget),
        continues=continues,
    )
    prompt = replace(prompt, reads_calls=reads_calls, calls=calls)
    return ChatRequest(
        model=body.model,
        identity=body.identity(headers),
        prompt=prompt,
        sampling=replace(sampling, thoughts=thought_limit(budget, body.effort)),
        stream=body.stream,
        include_usage=bool(body.include_usage),
        priority=body.priority(headers),
        retain_s=body.retain_s,
        prefetch=expected_next(headers),
        left_out=left_out_fields(body),
        ignored=_ignored_names(body, tools, messages),
        batch=AnswerBatch((prompt,), body.n, body.n) if body.n > 1 else None,
        custom_tools=tools.custom,
    )


def _ignored_names(
    body: ChatBody, tools: _ChatTools, messages: Sequence[Message]
) -> tuple[str, ...]:
    """Return the names of parameters without effect: hosted tools, fields, parts of contents."""
    parts = (name for message in body.messages for name in message.content.ignored)
    fields = () if body.web_search_options is None else ("web_search_options",)
    return tuple(dict.fromkeys((*tools.hosted, *fields, *parts, *ignored_lines(messages))))


def _continues(body: ChatBody, messages: Sequence[Message]) -> bool:
    """Return whether to continue the last message instead of answering it."""
    named, opens = "continue_final_message", "add_generation_prompt"
    if body.continue_final_message and body.add_generation_prompt:
        refuse(named, f"excludes {opens}: set one of them")
    reasons = {
        named: body.continue_final_message,
        opens: body.add_generation_prompt is False,
        f"messages[{len(messages) - 1}].prefix": body.messages[-1].prefix,
    }
    reason = next((param for param, holds in reasons.items() if holds), None)
    if reason is not None and messages[-1].role is not MessageRole.ASSISTANT:
        refuse(reason, "the last message is not an answer that can be continued")
    return reason is not None


def _tools(tools: Sequence[Function | CustomTool | HostedTool], sent: Sequence[Any]) -> _ChatTools:
    functions, strict, custom, texts = [], [], set(), []
    for tool, tool_sent in zip(tools, sent, strict=True):
        if isinstance(tool, Function):
            functions.append(tool_sent)
            strict += [tool.name] if tool.strict else []
            continue
        if isinstance(tool, HostedTool):
            continue
        name, function = tool.name, tool.function()
        custom.add(name)
        if function.rules:
            texts.append(ToolText(name, function.rules))
        declaration: dict[str, Any] = {"name": name, **function.declaration}
        if function.is_strict:
            strict.append(name)
            declaration["strict"] = True
        functions.append({"type": "function", "function": declaration})
    hosted = hosted_types(tools)
    return _ChatTools(functions, tuple(strict), frozenset(custom), tuple(texts), hosted)

"""The body of POST /v1/messages: unknown fields are ignored, known ones are checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.sampling_defaults import TOP_K_MAX, chosen_or_built_in, left_out_fields
from fabric.settings import THINKING_SWITCHES
from fabric.turn.answer_constraints import OutputFormat
from fabric.turn.generation import Identity, Priority, Sampling
from router.anthropic.content import CACHE_CONTROL, TEXT_BLOCKS, Notes, TextBlock
from router.anthropic.context_management import CONTEXT_MANAGEMENT, AnyEdit, counted_edits
from router.anthropic.dialect import THREAD_UNSUPPORTED
from router.anthropic.messages import MESSAGES, AnyMessage, conversation
from router.anthropic.tools import TOOL_CHOICE, TOOLS, Tool, ToolChoice, call_choice, functions_of
from router.api.adapter import ApiRequest
from router.api.conversation import is_begun, refuse_format
from router.api.other_content import OtherContent
from router.api.shared_fields import (
    TEMPLATE_OPTIONS,
    StopTexts,
    TokenLimit,
    TopP,
    answer_format,
    thought_limit,
    with_budget,
    with_effort,
)
from router.api.tool_choice import HostedTool
from router.http.refusals import refuse, unsupported
from router.http.schema import (
    AnyValue,
    Flag,
    Integer,
    Number,
    ObjectOf,
    Parsed,
    Text,
    optional,
    refuse_missing,
    required,
    words,
)
from router.http.turn_headers import expected_next, identify, priority_of
from router.limits import KEY_CHARS_MAX
from router.policies.policy import CountedEdit
from router.prompt import Prompt, chat_prompt

_WITHOUT_EFFECT: Final = ("diagnostics", "speed", "inference_geo")
_HOSTED: Final = ("mcp_servers", "container")  # what runs tools at Anthropic
_KEY: Final = Text(KEY_CHARS_MAX)


def _remote_service(value: Any, param: str) -> None:
    """Refuse a service that Anthropic runs, unless it is empty."""
    if value:
        unsupported(param, "this server runs only the model")


def _thread(_value: Any, param: str) -> None:
    """Refuse a thread: the request would hold only the new part of the conversation."""
    refuse(param, "this server keeps no conversation: send all of it", THREAD_UNSUPPORTED)


_FORMAT: Final = answer_format(is_strict=True)
_REMOTE: Final = Parsed(_remote_service, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Thinking:
    type: str = required(words("enabled", "adaptive", "disabled"))
    budget_tokens: int | None = optional(TokenLimit())


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputConfig:
    effort: str | None = optional(words("low", "medium", "high", "xhigh", "max"))
    format: OutputFormat | None = optional(_FORMAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metadata:
    user_id: str | None = optional(_KEY)
    agent_id: str | None = optional(_KEY)

    @property
    def session(self) -> str | None:
        """The session that coding agents name in a user's id, which is JSON with them."""
        if self.user_id is None or not self.user_id.startswith("{"):
            return None
        try:
            user = parse_json(self.user_id)
        except RejectedError:
            return None
        session = user.get("session_id") if isinstance(user, dict) else None
        return session if isinstance(session, str) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBody:
    """Fields of a body that become tokens; the body of POST /v1/messages/count_tokens."""

    model: str = required(Text())
    system: list[TextBlock | OtherContent] | None = optional(TEXT_BLOCKS)
    messages: list[AnyMessage] = required(MESSAGES)
    tools: list[Tool | HostedTool] | None = optional(TOOLS)
    tool_choice: ToolChoice | None = optional(TOOL_CHOICE)
    mcp_servers: Any = optional(AnyValue())
    container: Any = optional(AnyValue())
    fallbacks: Any = optional(_REMOTE)
    thread: Any = optional(Parsed(_thread, {}))
    diagnostics: Any = optional(AnyValue())
    speed: Any = optional(AnyValue())
    inference_geo: Any = optional(AnyValue())
    cache_s: float | None = optional(CACHE_CONTROL, name="cache_control")
    thinking: _Thinking | None = optional(ObjectOf(_Thinking))
    chat_template_kwargs: dict[str, Any] | None = optional(TEMPLATE_OPTIONS)
    output_config: _OutputConfig = optional(ObjectOf(_OutputConfig), _OutputConfig())
    context_management: Sequence[AnyEdit] | None = optional(CONTEXT_MANAGEMENT)

    @property
    def shows_thoughts(self) -> bool:
        """Whether the answer shows its reasoning; off by default."""
        return self.thinking is not None and self.thinking.type != "disabled"

    @property
    def thought_tokens(self) -> int | None:
        """The budget of thoughts, if the body has one."""
        if self.thinking is None:
            return None
        return self.thinking.budget_tokens if self.shows_thoughts else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesBody(PromptBody):
    """Body of POST /v1/messages."""

    max_tokens: int = required(TokenLimit(low=0))
    temperature: float | None = optional(Number(0.0, 1.0))
    top_p: float | None = optional(TopP())
    top_k: int | None = optional(Integer(0, TOP_K_MAX))
    stop_sequences: tuple[str, ...] = optional(StopTexts(), ())
    output_format: OutputFormat | None = optional(_FORMAT)  # its name in the beta
    stream: bool = optional(Flag(), False)
    service_tier: str | None = optional(words("auto", "standard_only"))
    metadata: _Metadata = optional(ObjectOf(_Metadata), _Metadata())


PROMPT_BODY: Final = ObjectOf(PromptBody)
MESSAGES_BODY: Final = ObjectOf(MessagesBody)


@dataclass(frozen=True, slots=True)
class AnthropicRequest(ApiRequest):
    """A checked request, and what its answer depends on."""

    shows_thoughts: bool
    only_warms: bool  # nothing is generated: the prompt is cached for later
    is_managed: bool = False  # the answer lists what was cleared of its context


@dataclass(frozen=True, slots=True)
class RequestedPrompt:
    """Prompt of a request to either route."""

    prompt: Prompt
    edits: tuple[CountedEdit, ...] | None  # None: the request has none


def requested_prompt(body: PromptBody, notes: Notes) -> RequestedPrompt:
    """Return the prompt of a body; raise RejectedError naming the first wrong parameter."""
    messages = conversation(body.system, body.messages, notes)
    tools = body.tools or []
    functions = functions_of(tools, notes)
    reads_calls, calls = call_choice(body.tool_choice, tools)
    for name in _WITHOUT_EFFECT:
        if getattr(body, name) is not None:
            notes.ignore(name)
    notes.ignore(*(name for name in _HOSTED if getattr(body, name)))
    notes.retain(body.cache_s)
    _check_budget(body.thinking)
    options = with_effort(body.chat_template_kwargs, body.output_config.effort)
    options = with_budget(options, body.thought_tokens)
    for name in THINKING_SWITCHES:
        options.setdefault(name, body.shows_thoughts)
    continues = is_begun(messages, "messages")
    prompt = chat_prompt(messages, functions or None, options, continues=continues)
    prompt = replace(prompt, reads_calls=reads_calls, calls=calls)
    edits = body.context_management
    return RequestedPrompt(prompt, None if edits is None else counted_edits(edits, notes))


def _check_budget(thinking: _Thinking | None) -> None:
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
        refuse_missing("thinking.budget_tokens")


def parse_request(headers: Mapping[str, str], sent: dict[str, Any]) -> AnthropicRequest:
    """Check a body; raise RejectedError naming the first parameter that is wrong."""
    body, notes = MESSAGES_BODY.read(sent), Notes()
    requested = requested_prompt(body, notes)
    only_warms = body.max_tokens == 0
    if body.stream and only_warms:
        refuse("max_tokens", "an answer without tokens cannot be streamed")
    sampling = Sampling(
        max_tokens=max(1, body.max_tokens),
        **chosen_or_built_in(body),
        stop=body.stop_sequences,
        output=body.output_config.format or body.output_format,
        thoughts=thought_limit(body.thought_tokens, body.output_config.effort),
    )
    if requested.prompt.continues:
        refuse_format(sampling, "output_config.format", requested.prompt.calls)
    metadata = body.metadata
    return AnthropicRequest(
        model=body.model,
        identity=_identity(headers, metadata),
        prompt=requested.prompt,
        sampling=sampling,
        stream=body.stream,
        priority=priority_of(headers, Priority.INTERACTIVE),
        prefetch=expected_next(headers),
        left_out=left_out_fields(body),
        shows_thoughts=body.shows_thoughts,
        only_warms=only_warms,
        retain_s=notes.retain_s,
        ignored=tuple(notes.ignored),
        own_edits=requested.edits or (),
        is_managed=requested.edits is not None,
    )


def _identity(headers: Mapping[str, str], metadata: _Metadata) -> Identity:
    return identify(headers, [metadata.agent_id, metadata.session, metadata.user_id])

"""POST generate: append to an agent's context and answer, without sending the history again."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.errors import FabricError
from fabric.ids import AgentId, TenantId
from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
from fabric.sampling_defaults import chosen_or_built_in, left_out_fields
from fabric.turn.generation import (
    Admitted,
    Delta,
    Finished,
    Identity,
    IdentityKind,
    Priority,
    Sampling,
    ToolCall,
    ToolCalls,
)
from fabric.turn.messages import Message, MessageRole
from router.api.adapter import ApiAdapter, ApiRequest
from router.api.edit_fields import OWN_FIELD
from router.api.other_content import OTHER_PART, Content, content_kind
from router.api.shared_fields import (
    SEED,
    TEMPLATE_OPTIONS,
    THOUGHT_TOKENS,
    StopTexts,
    TokenLimit,
    TopP,
    thought_limit,
    with_budget,
    with_effort,
)
from router.api.tool_choice import (
    FUNCTION_TOOLS,
    TOOL_CHOICE,
    Function,
    HostedTool,
    ToolChoice,
    function_choice,
    hosted_types,
)
from router.api.turn_route import TurnServices, answer_turn
from router.fleet.fleet import Fleet
from router.fleet.prompt_queries import continued_prompt
from router.fresh_ids import fresh_name, fresh_operation
from router.http.auth import agent_key
from router.http.errors import ErrorBody, ErrorDialect
from router.http.refusals import refuse
from router.http.schema import (
    AnyValue,
    ArrayOf,
    Flag,
    Number,
    ObjectOf,
    Tagged,
    Text,
    WordIn,
    only,
    optional,
    required,
)
from router.http.sse import COMMENT, frame
from router.http.turn_headers import expected_next, priority_of
from router.limits import MESSAGE_NAME_CHARS_MAX
from router.prompt import Prompt, chat_prompt, raw_prompt
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent

PATH: Final = "/v1/agents/{agent}/generate"
_PART: Final = Tagged({"text": only("text", Text())}, other=OTHER_PART)
_CONTENT: Final = content_kind(_PART)
_ROLES: Final = {
    role.value: role
    for role in (MessageRole.SYSTEM, MessageRole.USER, MessageRole.ASSISTANT, MessageRole.TOOL)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    role: MessageRole = required(WordIn(_ROLES))
    content: Content = required(_CONTENT)

    def message(self) -> Message:
        return Message(self.role, self.content.texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToolResult(_Message):
    tool_call_id: str | None = optional(Text(MESSAGE_NAME_CHARS_MAX))

    def message(self) -> Message:
        return Message(self.role, self.content.texts, result_of=self.tool_call_id)


_RECORDS: Final = {role: ObjectOf(_Message) for role in _ROLES} | {"tool": ObjectOf(_ToolResult)}
_EXPECTED: Final = f"expected one of {', '.join(_ROLES)}"
_MESSAGES: Final = ArrayOf(
    Tagged(_RECORDS, _EXPECTED, "invalid_value", tag="role"), MESSAGES_MAX, count_min=1
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateBody:
    """Body of POST /v1/agents/{agent}/generate."""

    text: str | None = optional(Text(chars_min=1))
    messages: list[_Message] | None = optional(_MESSAGES)
    model: str = optional(Text(), "")
    max_tokens: int = optional(TokenLimit(), COMPLETION_TOKENS_MAX)
    temperature: float | None = optional(Number(0.0, 2.0))
    top_p: float | None = optional(TopP())
    seed: int | None = optional(SEED)
    stop: tuple[str, ...] = optional(StopTexts(), ())
    stream: bool = optional(Flag(), False)
    chat_template_kwargs: dict[str, Any] | None = optional(TEMPLATE_OPTIONS)
    reasoning_effort: str | None = optional(Text(32))
    thinking_budget: int | None = optional(THOUGHT_TOKENS)
    tools: list[Function | HostedTool] = optional(FUNCTION_TOOLS, ())
    tool_choice: ToolChoice | None = optional(TOOL_CHOICE)
    parallel_tool_calls: bool = optional(Flag(), True)
    own: Any = optional(AnyValue(), name=OWN_FIELD)  # read by `edits_of`, as in every dialect

    def prompt(self) -> Prompt:
        """Return the prompt; raise RejectedError unless it is either a text or messages."""
        if (self.text is None) == (self.messages is None):
            refuse("text", "send exactly one of text and messages")
        reads_calls, calls = function_choice(
            self.tool_choice, self.tools, parallel=self.parallel_tool_calls
        )
        if self.text is not None:
            if self.tools:
                refuse("tools", "tools require messages: answers to a text are not read for calls")
            return raw_prompt(self.text)
        messages = [message.message() for message in self.messages or ()]
        functions = [tool for tool in self.tools if isinstance(tool, Function)]
        shown = [{"type": "function", "function": function.sent} for function in functions]
        options = with_effort(self.chat_template_kwargs, self.reasoning_effort)
        prompt = chat_prompt(messages, shown or None, with_budget(options, self.thinking_budget))
        return replace(prompt, reads_calls=reads_calls, calls=calls)

    def ignored(self) -> tuple[str, ...]:
        """Return the types of hosted tools, and of content that the model does not see."""
        contents = (message.content for message in self.messages or ())
        return (*hosted_types(self.tools), *(name for c in contents for name in c.ignored))

    def sampling(self) -> Sampling:
        """Return the sampling parameters."""
        return Sampling(
            max_tokens=self.max_tokens,
            **chosen_or_built_in(self),
            seed=self.seed,
            stop=self.stop,
            thoughts=thought_limit(self.thinking_budget, self.reasoning_effort),
        )


GENERATE_BODY: Final = ObjectOf(GenerateBody, is_strict=True)


class GenerateApi:
    """Turns of named agents, which keep their own history."""

    def __init__(self, fleet: Fleet, services: TurnServices, dialect: ErrorDialect) -> None:
        self._fleet = fleet
        self._services = services
        self._dialect = dialect

    def routes(self) -> list[Route]:
        return [Route(PATH, self.generate, methods=["POST"])]

    async def generate(self, request: Request) -> Response:
        """Answer with one JSON object, or with a stream of named events."""
        adapter = _Generate(agent_key(request)[1], self._fleet, self._dialect)
        return await answer_turn(adapter, self._services, request)


@dataclass(frozen=True, slots=True)
class _Generate(ApiAdapter[ApiRequest]):
    """Dialect of `generate`, for one agent."""

    agent: AgentId
    fleet: Fleet
    dialect: ErrorDialect
    path = PATH
    idle = COMMENT
    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        return self.dialect.error(error)

    def parse(self, headers: Mapping[str, str], sent: dict[str, Any], /) -> ApiRequest:
        body = GENERATE_BODY.read(sent)
        return ApiRequest(
            model=body.model,
            identity=Identity(IdentityKind.AGENT, self.agent),
            prompt=body.prompt(),
            sampling=body.sampling(),
            stream=body.stream,
            priority=priority_of(headers, Priority.INTERACTIVE),
            prefetch=expected_next(headers),
            left_out=left_out_fields(body),
            ignored=body.ignored(),
            is_whole_conversation=False,
            continues_memory=True,
        )

    async def with_history(self, tenant: TenantId, request: ApiRequest) -> ApiRequest:
        """Append the request to the agent's context, if there is one."""
        turn = request.turn(fresh_operation(), tenant)
        continued = await continued_prompt(self.fleet, turn)
        if continued is not None:
            model, prompt = continued
            given = request.prompt
            prompt = replace(
                prompt, tools=given.tools, reads_calls=given.reads_calls, calls=given.calls
            )
            return replace(request, model=model, prompt=prompt)
        return request if request.model else replace(request, model=self._only_model())

    def whole(self, request: ApiRequest, admitted: Admitted, answer: WholeAnswer) -> dict[str, Any]:
        return {
            "id": admitted.agent,
            "object": "agent.generation",
            "node": admitted.node,
            "text": answer.text,
            "reasoning": answer.reasoning,
            "tool_calls": [_call(call) for call in answer.calls],
            **_end_row(admitted, answer.finished),
        }

    async def frames(
        self, request: ApiRequest, admitted: Admitted, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta) and event.text:
                    name = "reasoning" if event.reasoning else "text"
                    yield frame({"text": event.text}, name)
                elif isinstance(event, ToolCalls):
                    for call in event.calls:
                        yield frame(_call(call), "tool_call")
                elif isinstance(event, Finished):
                    yield frame(_end_row(admitted, event), "end")

    def _only_model(self) -> str:
        models = self.fleet.models()
        if len(models) != 1:
            refuse("model", "name the model of a new agent: one of " + ", ".join(sorted(models)))
        return next(iter(models))


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or fresh_name("call_"),
        "name": call.name,
        "arguments": call.arguments,
        **({"broken": True} if call.is_broken else {}),
    }


def _end_row(admitted: Admitted, finished: Finished) -> dict[str, Any]:
    return {
        "epoch": admitted.epoch,
        "finish_reason": finished.reason.value,
        "prompt_tokens": admitted.prompt_tokens,
        "cached_tokens": admitted.cached_tokens,
        "completion_tokens": finished.completion_tokens,
        "durable": finished.durable,
    }

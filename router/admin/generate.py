"""POST generate: more for an agent's memory, and its answer; nothing is sent a second time."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fabric.errors import FabricError
from fabric.ids import AgentId, TenantId
from fabric.limits import COMPLETION_TOKENS_MAX, MESSAGES_MAX
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
from router.api.adapter import ApiAdapter, Asked
from router.api.edit_fields import OWN_FIELD
from router.api.function_tools import parse_functions
from router.api.sampling_fields import parse_seed, parse_temperature, parse_top_p, stop_strings
from router.api.template_options import template_options
from router.api.tool_choice import parse_function_choice
from router.api.turn_route import Desk, answer_turn
from router.fleet.fleet import Fleet
from router.fleet.prompt_queries import continued_prompt
from router.fresh_ids import fresh_name, fresh_operation
from router.http.auth import agent_key
from router.http.dialect import ErrorBody, ErrorDialect
from router.http.fields import Fields, refuse, require_object, require_text
from router.http.sse import COMMENT, frame
from router.http.turn_headers import expected_next, priority_of
from router.limits import MESSAGE_NAME_CHARS_MAX, STOP_STRINGS_MAX
from router.prompt import Prompt, chat_prompt, raw_prompt
from router.turns.answer import WholeAnswer
from router.turns.open_turn import AnswerEvent

PATH = "/v1/agents/{agent}/generate"
_FIELDS = (
    "text", "messages", "model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream",
    "chat_template_kwargs", "tools", "tool_choice", "parallel_tool_calls", OWN_FIELD,
)  # fmt: skip


class GenerateApi:
    """Turns of agents that are named, and need not be told what they know."""

    def __init__(self, fleet: Fleet, desk: Desk, dialect: ErrorDialect) -> None:
        self._fleet = fleet
        self._desk = desk
        self._dialect = dialect

    def routes(self) -> list[Route]:
        return [Route("/v1/agents/{agent}/generate", self.generate, methods=["POST"])]

    async def generate(self, request: Request) -> Response:
        """Answer whole, or as named events."""
        adapter = _Generate(agent_key(request)[1], self._fleet, self._dialect)
        return await answer_turn(adapter, self._desk, request)


@dataclass(frozen=True, slots=True)
class _Generate(ApiAdapter[Asked]):
    """The agent-native dialect, for one agent."""

    agent: AgentId
    fleet: Fleet
    dialect: ErrorDialect
    path = PATH
    idle = COMMENT
    streams_calls = False

    def error(self, error: FabricError) -> ErrorBody:
        return self.dialect.error(error)

    def parse(self, headers: Mapping[str, str], body: dict[str, Any]) -> Asked:
        fields = Fields(body)
        fields.allow_only(*_FIELDS)
        return Asked(
            model=fields.text("model") or "",
            identity=Identity(IdentityKind.AGENT, self.agent),
            prompt=_prompt(fields),
            sampling=_sampling(fields),
            stream=fields.flag("stream"),
            priority=priority_of(headers, Priority.INTERACTIVE),
            prefetch=expected_next(headers),
            is_whole_conversation=False,
        )

    async def recalled(self, tenant: TenantId, asked: Asked) -> Asked:
        """Put what is asked behind what the agent remembers; a new agent gets it alone."""
        turn = asked.turn(fresh_operation(), tenant)
        found = await continued_prompt(self.fleet, turn)
        if found is not None:
            model, prompt = found
            given = asked.prompt
            prompt = replace(
                prompt, tools=given.tools, reads_calls=given.reads_calls, calls=given.calls
            )
            return replace(asked, model=model, prompt=prompt)
        return asked if asked.model else replace(asked, model=self._only_model())

    def whole(self, asked: Asked, admitted: Admitted, answer: WholeAnswer) -> dict[str, Any]:
        return {
            "id": admitted.agent,
            "object": "agent.generation",
            "node": admitted.node,
            "text": answer.text,
            "reasoning": answer.reasoning,
            "tool_calls": [_call(call) for call in answer.calls],
            **_ended(admitted, answer.finished),
        }

    async def frames(
        self, asked: Asked, admitted: Admitted, events: AsyncGenerator[AnswerEvent, None]
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
                    yield frame(_ended(admitted, event), "end")

    def _only_model(self) -> str:
        models = self.fleet.models()
        if len(models) != 1:
            refuse("model", "a new agent needs one of " + ", ".join(sorted(models)))
        return next(iter(models))


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id or fresh_name("call_"),
        "name": call.name,
        "arguments": call.arguments,
    }


def _ended(admitted: Admitted, finished: Finished) -> dict[str, Any]:
    return {
        "epoch": admitted.epoch,
        "finish_reason": finished.reason.value,
        "prompt_tokens": admitted.prompt_tokens,
        "cached_tokens": admitted.cached_tokens,
        "completion_tokens": finished.completion_tokens,
        "durable": finished.durable,
    }


def _prompt(fields: Fields) -> Prompt:
    text, items = fields.text("text"), fields.items("messages", MESSAGES_MAX)
    if (text is None) == (items is None):
        refuse("text", "send either text or messages")
    options, tools = template_options(fields), parse_functions(fields)
    reads_calls, calls = parse_function_choice(fields, tools)
    if text is not None:
        if tools:
            refuse("tools", "they are for messages: nothing is read of what follows a text")
        return raw_prompt(text) if text else refuse("text", "it is empty")
    if not items:
        refuse("messages", "it is empty")
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(items)]
    prompt = chat_prompt(messages, tools or None, options)
    return replace(prompt, reads_calls=reads_calls, calls=calls)


def _message(item: object, param: str) -> Message:
    fields = Fields(require_object(item, param), f"{param}.")
    role = require_text(fields.require("role"), fields.param("role"))
    if role not in ("system", "user", "assistant", "tool"):
        refuse(fields.param("role"), "expected one of system, user, assistant, tool")
    text = require_text(fields.require("content"), fields.param("content"))
    result_of = fields.text("tool_call_id", MESSAGE_NAME_CHARS_MAX) if role == "tool" else None
    return Message(MessageRole(role), (text,), result_of=result_of)


def _sampling(fields: Fields) -> Sampling:
    return Sampling(
        max_tokens=fields.integer("max_tokens", 1, COMPLETION_TOKENS_MAX) or COMPLETION_TOKENS_MAX,
        temperature=parse_temperature(fields, 2.0),
        top_p=parse_top_p(fields),
        seed=parse_seed(fields),
        stop=stop_strings(fields.items("stop", STOP_STRINGS_MAX) or [], "stop"),
    )

"""The body of POST /v1/chat/completions: unknown fields are ignored, known ones are checked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fabric.limits import COMPLETION_TOKENS_MAX
from fabric.turn.messages import Message, MessageRole
from fabric.turn.text_rules import ToolText
from router.api.adapter import Several
from router.api.begun_answer import is_begun, refuse_format, without_empty
from router.api.billing_line import ignored_lines, without_billing_lines
from router.api.function_tools import checked_function
from router.api.template_options import template_options, with_effort
from router.api.tool_choice import parse_function_choice
from router.http.fields import Fields, refuse, require_object, require_text, unsupported
from router.http.turn_headers import expected_next
from router.limits import TOOLS_MAX, TOP_LOGPROBS_MAX
from router.openai.chat_messages import parse_messages
from router.openai.custom_tools import custom_function
from router.openai.request import (
    OpenAiRequest,
    parse_count,
    parse_identity,
    parse_priority,
    parse_retention_s,
    parse_stream,
)
from router.openai.sampling import parse_sampling, tokens_limit
from router.prompt import chat_prompt


@dataclass(frozen=True, slots=True)
class ChatRequest(OpenAiRequest):
    """A checked chat."""

    custom_tools: frozenset[str]  # of its tools, those that take a text


def parse_chat(headers: Mapping[str, str], body: dict[str, Any]) -> ChatRequest:
    """Check a chat body; raise RejectedError naming the first parameter that is wrong."""
    fields = Fields(body)
    model = require_text(fields.require("model"), "model")
    messages = parse_messages(fields)
    tools, custom, texts = _tools(fields)
    reads_calls, calls = parse_function_choice(fields, tools or [], texts)
    _refuse_unsupported(fields)
    count = parse_count(fields, "n") or 1
    stream, include_usage = parse_stream(fields)
    limit = tokens_limit(fields, "max_completion_tokens") or tokens_limit(fields, "max_tokens")
    sampling = parse_sampling(
        fields, max_tokens=limit or COMPLETION_TOKENS_MAX, logprobs=_logprobs(fields)
    )
    continues = _continues(fields, messages)
    if continues:
        refuse_format(sampling, "response_format", calls)
        messages = without_empty(messages, "messages")
        continues = is_begun(messages, "messages")
    prompt = replace(
        chat_prompt(
            without_billing_lines(messages), tools, _template_options(fields), continues=continues
        ),
        reads_calls=reads_calls,
        calls=calls,
    )
    return ChatRequest(
        model=model,
        identity=parse_identity(headers, fields),
        prompt=prompt,
        sampling=sampling,
        stream=stream,
        include_usage=include_usage,
        priority=parse_priority(headers, fields),
        retain_s=parse_retention_s(fields),
        prefetch=expected_next(headers),
        ignored=ignored_lines(messages),
        several=Several((prompt,), count, count) if count > 1 else None,
        custom_tools=custom,
    )


def _continues(fields: Fields, messages: Sequence[Message]) -> bool:
    """Say whether the last message is to be gone on with: OpenAI's own API answers it."""
    named, opens = "continue_final_message", "add_generation_prompt"
    is_asked = fields.flag(named)
    if is_asked and fields.flag(opens):
        refuse(named, f"{opens} asks for a message of its own")
    last = Fields(fields.raw("messages")[-1], f"messages[{len(messages) - 1}].")
    wishes = {
        named: is_asked,
        opens: fields.raw(opens) is False,
        last.param("prefix"): last.flag("prefix"),
    }
    wish = next((name for name, holds in wishes.items() if holds), None)
    if wish is not None and messages[-1].role is not MessageRole.ASSISTANT:
        refuse(wish, "the last message is no answer that could be continued")
    return wish is not None


def _logprobs(fields: Fields) -> int | None:
    alternatives = fields.integer("top_logprobs", 0, TOP_LOGPROBS_MAX)
    if fields.flag("logprobs"):
        return alternatives or 0
    if alternatives is not None:
        refuse("top_logprobs", "it needs logprobs to be true")
    return None


def _tools(fields: Fields) -> tuple[list[Any] | None, frozenset[str], tuple[ToolText, ...]]:
    """Return the tools as templates get them, which are custom ones, and rules of their texts."""
    tools, custom, texts = [], set(), []
    for index, item in enumerate(fields.items("tools", TOOLS_MAX) or []):
        tool = Fields(require_object(item, f"tools[{index}]"), f"tools[{index}].")
        kind = require_text(tool.require("type"), tool.param("type"))
        if kind == "custom":
            form = require_object(tool.require(kind), tool.param(kind))
            inner = Fields(form, tool.param("custom."))
            name = require_text(inner.require("name"), inner.param("name"))
            if not name:
                refuse(inner.param("name"), "it is empty")
            custom.add(name)
            made = custom_function(inner)
            bound = {"strict": True} if made.is_strict else {}
            if made.rules:
                texts.append(ToolText(name, made.rules))
            tools.append({"type": "function", "function": {"name": name, **made.spelled, **bound}})
        elif kind == "function":
            checked_function(tool)
            tools.append(item)
        else:
            unsupported(tool.param("type"), "functions and custom tools are called")
    return tools or None, frozenset(custom), tuple(texts)


def _refuse_unsupported(fields: Fields) -> None:
    if fields.raw("best_of") not in (None, 1):
        unsupported("best_of", "chats have n")
    for name in ("functions", "function_call"):
        if fields.raw(name) is not None:
            unsupported(name, "use tools and tool_choice")
    modalities = fields.raw("modalities")
    if modalities not in (None, ["text"]) or fields.raw("audio") is not None:
        name = "audio" if modalities in (None, ["text"]) else "modalities"
        unsupported(name, "this server answers with text only")


def _template_options(fields: Fields) -> dict[str, Any]:
    options = template_options(fields)
    effort = fields.text("reasoning_effort", 32)
    if effort is not None:
        with_effort(options, effort)
    return options

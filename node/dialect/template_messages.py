"""Messages as a model's chat template accepts them, changed as little as possible.

Templates write whole messages only. To continue an answer, a mark is put at the end of its text and
the prompt is cut there: what the template writes after it would end the message.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from fabric.errors import RejectedError
from node.dialect.answer_delta import call_id

Messages = list[dict[str, Any]]
_MARK: Final = "\ue0f1\ue0f5\ue0f1"  # private characters, which no template trims or escapes


class WrittenArguments(dict[str, Any]):
    """Arguments of a call, with the text that the model wrote."""

    def __init__(self, text: str, parsed: dict[str, Any]) -> None:
        super().__init__(parsed)
        self.text = text


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Facts about how a template renders messages with calls."""

    takes_null: bool = False  # null is accepted as the content beside calls
    text_arguments: bool = False  # it prints objects in Python syntax, so arguments are JSON text
    thought_keys: tuple[str, ...] = ()  # other keys that it reads thoughts from
    takes_calls: bool = True  # False: it drops calls or their results
    takes_one_call: bool = False  # it keeps one call of a message and drops the others


def adapt_messages(messages: Messages, traits: TemplateTraits) -> Messages:
    """Return messages in the form that the template is known to expect."""
    adapted = [_with_thought(message, traits) for message in messages]
    if traits.takes_null:
        adapted = [{**m, "content": None} if _has_only_calls(m) else m for m in adapted]
    return _with_text_arguments(adapted) if traits.text_arguments else adapted


def alternative_forms(messages: Messages) -> Iterator[Messages]:
    """Yield other forms to try with a template that refuses the messages, least changed first."""
    for change in _CHANGES:
        changed = change(messages)
        if changed != messages:
            messages = changed
            yield messages


def mark_end(messages: list[Any]) -> list[Any]:
    """Mark the end of the last message's text, or of its thought if it has no text yet."""
    last = messages[-1]
    thought, text = last.get("reasoning_content"), last.get("content") or ""
    key = "content" if text or not thought else "reasoning_content"
    return [*messages[:-1], {**last, key: (last.get(key) or "") + _MARK}]


def cut_at_mark(text: str) -> str:
    """Return the text up to the mark; raise RejectedError if the template dropped it."""
    at = text.rfind(_MARK)
    if at < 0:
        message = "the model's chat template leaves out the answer that is to be continued"
        raise RejectedError(message, code="template_refused", param="messages")
    return text[:at]


def _with_thought(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    if not thought or not traits.thought_keys:
        return message
    changed = {**message, **dict.fromkeys(traits.thought_keys, thought)}
    if "thinking" in traits.thought_keys and message.get("tool_calls") and message.get("content"):
        # Such templates have one place for both beside a call.
        changed |= {"thinking": f"{thought}\n\n{message['content']}", "content": ""}
    return changed


def _has_only_calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


def _without_null(messages: Messages) -> Messages:
    return [{**m, "content": ""} if m.get("content") is None else m for m in messages]


def _map_arguments(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    def changed(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]}
        if m.get("tool_calls")
        else m
        for m in messages
    ]


def _with_object_arguments(messages: Messages) -> Messages:
    """Wrap arguments that are not an object."""
    return _map_arguments(messages, lambda a: {"arguments": a} if isinstance(a, str) else a)


def _with_text_arguments(messages: Messages) -> Messages:
    return _map_arguments(messages, arguments_text)


def arguments_text(arguments: Any) -> str:
    """Return a call's arguments as the model or the client wrote them, else as JSON."""
    if isinstance(arguments, WrittenArguments):
        return arguments.text
    is_text = isinstance(arguments, str)
    return arguments if is_text else json.dumps(arguments, ensure_ascii=False)


def _with_short_ids(messages: Messages) -> Messages:
    """Rename calls whose ids Mistral's templates refuse."""
    renamed: Messages = []
    for message in messages:
        calls = message.get("tool_calls")
        changed = dict(message)
        if calls:
            changed["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in calls]
        if message.get("role") == "tool":
            changed["tool_call_id"] = _short_id(message.get("tool_call_id"))
        renamed.append(changed)
    return renamed


def _short_id(id_: str | None) -> str:
    text = id_ or ""
    return text if len(text) == 9 and text.isascii() and text.isalnum() else call_id(text, 0)


_CHANGES = (_without_null, _with_object_arguments, _with_short_ids, _with_text_arguments)

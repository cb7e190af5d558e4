"""Spell messages so that a model's chat template takes them, changing what it is told least."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from node.dialect.call_log import call_id

Messages = list[dict[str, Any]]


class WrittenArguments(dict[str, Any]):
    """Arguments of a call, with the text that the model wrote."""

    def __init__(self, text: str, parsed: dict[str, Any]) -> None:
        super().__init__(parsed)
        self.text = text


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template makes of messages with calls."""

    takes_null: bool = False  # as the content beside calls
    text_arguments: bool = False  # prints objects as Python does: it is meant to get JSON text
    thought_keys: tuple[str, ...] = ()  # where it looks for a thought, too
    takes_one_call: bool = False  # of a message: it says nothing of the others


def spelled(messages: Messages, traits: TemplateTraits) -> Messages:
    """Spell messages as the template is known to want them."""
    made = [_with_thought(message, traits) for message in messages]
    if traits.takes_null:
        made = [{**each, "content": None} if _only_calls(each) else each for each in made]
    return _with_text_arguments(made) if traits.text_arguments else made


def respelled(messages: Messages) -> Iterator[Messages]:
    """Yield what else to try with a template that refuses them, the least change first."""
    for change in _CHANGES:
        changed = change(messages)
        if changed != messages:
            messages = changed
            yield messages


def _with_thought(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    thought = message.get("reasoning_content")
    if not thought or not traits.thought_keys:
        return message
    made = {**message, **dict.fromkeys(traits.thought_keys, thought)}
    if "thinking" in traits.thought_keys and message.get("tool_calls") and message.get("content"):
        # Such templates have one place for both beside a call.
        made |= {"thinking": f"{thought}\n\n{message['content']}", "content": ""}
    return made


def _only_calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls")) and not message.get("content")


def _without_null(messages: Messages) -> Messages:
    return [{**m, "content": ""} if m.get("content") is None else m for m in messages]


def _with_arguments(messages: Messages, change: Callable[[Any], Any]) -> Messages:
    def use(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    return [
        {**m, "tool_calls": [use(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _with_object_arguments(messages: Messages) -> Messages:
    """Wrap what a model wrote and is no object."""
    return _with_arguments(messages, lambda a: {"arguments": a} if isinstance(a, str) else a)


def _with_text_arguments(messages: Messages) -> Messages:
    def text(arguments: Any) -> str:
        if isinstance(arguments, WrittenArguments):
            return arguments.text
        is_text = isinstance(arguments, str)
        return arguments if is_text else json.dumps(arguments, ensure_ascii=False)

    return _with_arguments(messages, text)


def _with_short_ids(messages: Messages) -> Messages:
    """Rename calls whose ids are not what Mistral's templates insist on."""
    made: Messages = []
    for message in messages:
        uses = message.get("tool_calls")
        changed = dict(message)
        if uses:
            changed["tool_calls"] = [{**use, "id": _short(use.get("id"))} for use in uses]
        if message.get("role") == "tool":
            changed["tool_call_id"] = _short(message.get("tool_call_id"))
        made.append(changed)
    return made


def _short(own_id: str | None) -> str:
    text = own_id or ""
    return text if len(text) == 9 and text.isascii() and text.isalnum() else call_id(text, 0)


_CHANGES = (_without_null, _with_object_arguments, _with_short_ids, _with_text_arguments)

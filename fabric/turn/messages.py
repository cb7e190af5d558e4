"""A conversation as the API adapters parse it, and as chat templates take it."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class MessageRole(StrEnum):
    """Author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A call in an earlier answer; `arguments` are text where the model wrote no object."""

    name: str
    arguments: dict[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message; reasoning and uses are an assistant's, a result is a tool's."""

    role: MessageRole
    texts: tuple[str, ...]  # its parts, in order
    name: str | None = None
    reasoning: str | None = None
    uses: tuple[ToolUse, ...] = ()
    result_of: str | None = None  # the id of the tool use
    is_stripped: bool = False  # of its reasoning, on purpose: it must not be restored
    is_error: bool = False  # reported by the client: the tool failed; templates cannot express it


def spelled_arguments(arguments: dict[str, Any] | str) -> str:
    """Return arguments in one spelling, whatever the client's or the model's was."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)


def template_form(message: Message) -> dict[str, Any]:
    """Return a message as chat templates expect it, much like OpenAI's API.

    The order of keys counts: templates may render it, and sketches are made of these bytes.
    """
    spelled: dict[str, Any] = {"role": message.role.value, "content": "".join(message.texts)}
    if message.name is not None:
        spelled["name"] = message.name
    if message.reasoning is not None:
        spelled["reasoning_content"] = message.reasoning
    if message.uses:
        spelled["tool_calls"] = [_use(use) for use in message.uses]
    if message.result_of is not None:
        spelled["tool_call_id"] = message.result_of
    return spelled


def _use(use: ToolUse) -> dict[str, Any]:
    spelled: dict[str, Any] = {"type": "function"}
    if use.id is not None:
        spelled["id"] = use.id
    spelled["function"] = {"name": use.name, "arguments": use.arguments}
    return spelled

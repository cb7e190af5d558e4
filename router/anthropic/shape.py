"""Parts of whole and streamed answers in Anthropic's dialect: message, blocks, usage."""

from base64 import b64encode
from hashlib import blake2b
from typing import Any, Final

from fabric.codec import parse_json
from fabric.errors import RejectedError
from fabric.turn.generation import Admitted, Finished, FinishReason, ToolCall
from fabric.turn.partial_json import whole_members
from router.anthropic.context_management import report
from router.anthropic.request import AnthropicRequest
from router.fresh_ids import fresh_name

_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessageShape:
    """Message of one answer."""

    def __init__(self, request: AnthropicRequest, admitted: Admitted) -> None:
        self.request = request
        self._admitted = admitted
        self._name = fresh_name("msg_")

    def message(self, content: list[Any], finished: Finished | None) -> dict[str, Any]:
        """Return the message; without `finished` it has only begun."""
        return {
            "id": self._name,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
            "content": content,
            **self.ending(finished),
            "usage": self.usage(finished),
            **self.management(finished),
        }

    def management(self, finished: Finished | None) -> dict[str, Any]:
        """Return the report of cleared content, if the request has context management."""
        if not self.request.is_managed:
            return {}
        return {"context_management": None if finished is None else report(self.request.outcomes)}

    def ending(self, finished: Finished | None) -> dict[str, Any]:
        """Return why the answer ended."""
        if finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        reason = _REASONS[finished.reason]
        if finished.reason is FinishReason.STOP and finished.stop_string is not None:
            reason = "stop_sequence"
        is_cut = finished.reason is FinishReason.LENGTH and not self.request.only_warms
        if is_cut and finished.completion_tokens < self.request.sampling.max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": finished.stop_string}

    def usage(self, finished: Finished | None) -> dict[str, Any]:
        """Return token counts; reused tokens count as read from the cache.

        Every computed token is cached, but only clients that mark breakpoints expect that count.
        """
        read = self._admitted.cached_tokens
        computed = self._admitted.prompt_tokens - read
        written = computed if self.request.retain_s else 0
        return {
            "input_tokens": computed - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": read,
            "output_tokens": 0 if finished is None else finished.completion_tokens,
        }


def thinking_block(thought: str) -> dict[str, Any]:
    """Return a `thinking` content block."""
    return {"type": "thinking", "thinking": thought, "signature": signature(thought)}


def text_block(text: str) -> dict[str, Any]:
    """Return a block of text."""
    return {"type": "text", "text": text}


def tool_use_block(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a block of a call, with its id in the prompt."""
    call_id = call.id or fresh_name("toolu_")
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": arguments}


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as an object, even if the model wrote something else.

    Of a broken call these are the members that are whole, as SDKs read them from a stream.
    """
    if call.is_broken:
        return whole_members(call.arguments)
    try:
        arguments = parse_json(call.arguments)
    except RejectedError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": call.arguments}


def signature(thought: str) -> str:
    """Return a signature of a thought, which clients expect and this server ignores."""
    return b64encode(blake2b(thought.encode("utf-8", "replace"), digest_size=48).digest()).decode()

"""Parts of whole and streamed answers of the Responses API: response, items, usage."""

from collections.abc import Sequence
from typing import Any

from fabric.edit_mode import TRUNCATES
from fabric.errors import FabricError
from fabric.turn.generation import Admitted, Finished, FinishReason, TokenLogprob, ToolCall
from router.fresh_ids import fresh_name
from router.openai.custom_tools import custom_text
from router.openai.responses.items import encode_thought
from router.openai.responses.request import ResponsesRequest
from router.openai.shape import logprob_form
from router.policies.truncation import TRUNCATION


class ResponseShape:
    """Response of one answer."""

    def __init__(self, request: ResponsesRequest, admitted: Admitted, created_s: int) -> None:
        self.request = request
        self.admitted = admitted
        self.name = fresh_name("resp_")
        self._created_s = created_s

    def begun(self) -> dict[str, Any]:
        """Return a response in progress."""
        return self._response("in_progress", [])

    def ended(self, output: list[Any], finished: Finished, reasoning_tokens: int) -> dict[str, Any]:
        """Return a completed response, or one cut at its token limit."""
        is_cut = finished.reason is FinishReason.LENGTH
        response = self._response("incomplete" if is_cut else "completed", output)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": self._usage(finished, reasoning_tokens)}

    def failed(self, output: list[Any], error: FabricError) -> dict[str, Any]:
        """Return a response that failed."""
        body = {"code": error.code, "message": error.message}
        return {**self._response("failed", output), "error": body}

    def reasoning(self, name: str, thought: str) -> dict[str, Any]:
        """Return an item of reasoning, with the thought as its summary if one is requested."""
        item: dict[str, Any] = {"id": name, "type": "reasoning"}
        if self.request.summarizes_thoughts:
            item["summary"] = [{"type": "summary_text", "text": thought}]
        else:
            content = [{"type": "reasoning_text", "text": thought}]
            item |= {"summary": [], "content": content}
        if self.request.carries_thoughts:
            item["encrypted_content"] = encode_thought(thought)
        return item

    def message(
        self, name: str, text: str, logprobs: Sequence[TokenLogprob], status: str
    ) -> dict[str, Any]:
        """Return an item of text."""
        content = [self.text_part(text, logprobs)]
        return {
            "id": name,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def text_part(self, text: str, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return a text as part of a message."""
        probabilities = self.logprobs(logprobs)
        part = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": probabilities}

    def logprobs(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """Return log probabilities, if requested."""
        if self.request.sampling.logprobs is None:
            return []
        return [logprob_form(token) for token in tokens]

    def call(self, call: ToolCall) -> dict[str, Any]:
        """Return an item of a call, with the client's name of its tool."""
        tool = self.request.tools.name_of(call)
        kind, argument = "function_call", {"arguments": call.arguments}
        if tool.is_custom:
            kind, argument = "custom_tool_call", {"input": custom_text(call)}
        item = {
            "id": fresh_name("ctc_" if tool.is_custom else "fc_"),
            "type": kind,
            "status": "incomplete" if call.is_broken else "completed",
            "call_id": call.id or fresh_name("call_"),
            "name": tool.name,
            **argument,
        }
        if tool.namespace is not None:
            item["namespace"] = tool.namespace
        return item

    @property
    def _is_truncated(self) -> bool:
        """Return whether something was dropped, perhaps by the fabric's default."""
        return any(each.name == TRUNCATION and each.count for each in self.request.outcomes)

    def _response(self, status: str, output: list[Any]) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self.request.model,
            "output": output,
            **self.request.echoed,
            **({"truncation": TRUNCATES} if self._is_truncated else {}),
            "usage": None,
        }

    def _usage(self, finished: Finished, reasoning_tokens: int) -> dict[str, Any]:
        prompt_tokens, cached = self.admitted.prompt_tokens, self.admitted.cached_tokens
        read = {"cached_tokens": cached, "cache_write_tokens": prompt_tokens - cached}
        return {
            "input_tokens": prompt_tokens,
            "input_tokens_details": read,
            "output_tokens": finished.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
            "total_tokens": prompt_tokens + finished.completion_tokens,
        }

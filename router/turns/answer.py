"""A whole answer, gathered from the events of one turn, and what responses say about it."""

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fabric.turn.generation import Admitted, Delta, FinishReason, TokenLogprob, ToolCall, ToolCalls
from router.turns.open_turn import OpenTurn

_REASON_CHARS_MAX = 200


@dataclass(slots=True)
class Answer:
    """Text, reasoning, calls and counts of one finished turn."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP
    completion_tokens: int = 0


async def gather(opened: OpenTurn) -> Answer:
    """Read a turn to its end."""
    answer = Answer()
    texts: list[str] = []
    thoughts: list[str] = []
    async with aclosing(opened.events()) as events:
        async for event in events:
            if isinstance(event, Delta):
                (thoughts if event.reasoning else texts).append(event.text)
                answer.logprobs.extend(event.logprobs)
            elif isinstance(event, ToolCalls):
                answer.calls.extend(event.calls)
            else:
                answer.reason = event.reason
                answer.completion_tokens = event.completion_tokens
    answer.text, answer.reasoning = "".join(texts), "".join(thoughts)
    return answer


def usage(admitted: Admitted, completion_tokens: int) -> dict[str, Any]:
    """Count tokens as OpenAI does, with those that were not computed again."""
    return {
        "prompt_tokens": admitted.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": admitted.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": admitted.cached_tokens},
    }


def memory_headers(admitted: Admitted) -> dict[str, str]:
    """Tell whose memory served the turn, where, and how much of it was used."""
    reason = admitted.match_reason.encode("ascii", "replace").decode()
    printable = "".join(c if c.isprintable() else " " for c in reason)
    return {
        "x-macfabric-agent": admitted.agent,
        "x-macfabric-node": admitted.node,
        "x-macfabric-epoch": str(admitted.epoch),
        "x-macfabric-cache": admitted.cache.value,
        "x-macfabric-match": admitted.match.value,
        "x-macfabric-match-reason": printable[:_REASON_CHARS_MAX].strip(),
        "x-macfabric-cached-tokens": str(admitted.cached_tokens),
    }

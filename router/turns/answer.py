"""A whole answer, gathered from the events of one turn, and what responses say about it."""

from contextlib import aclosing
from dataclasses import dataclass

from fabric.limits import MATCH_REASON_CHARS_MAX
from fabric.turn.generation import Admitted, Delta, Finished, TokenLogprob, ToolCall, ToolCalls
from router.turns.open_turn import OpenTurn


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Text, reasoning, calls and counts of one finished turn."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_tokens: int
    finished: Finished  # why, after how many tokens, at which stop string


async def gather(opened: OpenTurn) -> WholeAnswer:
    """Read a turn to its end; raise FabricError where its node breaks off."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    reasoning_tokens = 0
    finished: Finished | None = None
    async with aclosing(opened.events()) as events:
        async for event in events:
            if isinstance(event, Delta):
                (thoughts if event.reasoning else texts).append(event.text)
                logprobs.extend(event.logprobs)
                reasoning_tokens = event.index + 1 if event.reasoning else reasoning_tokens
            elif isinstance(event, ToolCalls):
                calls.extend(event.calls)
            else:
                finished = event
    assert finished is not None, "a stream without a last event raises"
    return WholeAnswer(
        "".join(texts),
        "".join(thoughts),
        tuple(calls),
        tuple(logprobs),
        reasoning_tokens,
        finished,
    )


def cache_headers(admitted: Admitted) -> dict[str, str]:
    """Tell whose KV cache served the turn, where, and how much of it was used."""
    reason = admitted.match_reason.encode("ascii", "replace").decode()
    printable = "".join(c if c.isprintable() else " " for c in reason)
    folds = {"x-macfabric-template": "; ".join(admitted.template)} if admitted.template else {}
    return {
        **folds,
        "x-macfabric-agent": admitted.agent,
        "x-macfabric-node": admitted.node,
        "x-macfabric-epoch": str(admitted.epoch),
        "x-macfabric-cache": admitted.cache.value,
        "x-macfabric-match": admitted.match.value,
        "x-macfabric-match-reason": printable[:MATCH_REASON_CHARS_MAX].strip(),
        "x-macfabric-cached-tokens": str(admitted.cached_tokens),
    }

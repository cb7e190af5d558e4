"""Whole answers, gathered from the events of a turn, and response headers about their cache."""

from contextlib import aclosing
from dataclasses import dataclass, field

from fabric.turn.generation import (
    Admitted,
    Delta,
    Finished,
    TokenLogprob,
    ToolCall,
    ToolCallPart,
    ToolCalls,
)
from router.limits import MATCH_REASON_CHARS_MAX
from router.turns.open_turn import AnswerEvent, OpenTurn


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Text, reasoning, calls and counts of a finished turn."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_tokens: int
    finished: Finished  # reason, tokens and stop string
    echo: str = ""  # the prompt, if it was requested
    echo_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the answer's tokens; 0 for an empty answer."""
        known = [token.logprob for token in self.logprobs if token.logprob is not None]
        return sum(known) / len(known) if known else 0.0


@dataclass(slots=True)
class AnswerParts:
    """Parts of an answer received so far."""

    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    echoes: list[Delta] = field(default_factory=list)
    reasoning_tokens: int = 0
    finished: Finished | None = None

    def add(self, event: AnswerEvent | ToolCallPart) -> None:
        """Add the next event; parts of calls are skipped, as whole calls follow."""
        if isinstance(event, Delta):
            if event.is_echo:
                self.echoes.append(event)
                return
            (self.thoughts if event.reasoning else self.texts).append(event.text)
            self.logprobs.extend(event.logprobs)
            self.reasoning_tokens = event.index + 1 if event.reasoning else self.reasoning_tokens
        elif isinstance(event, ToolCalls):
            self.calls.extend(event.calls)
        elif isinstance(event, Finished):
            self.finished = event

    def whole(self) -> WholeAnswer:
        """Return the whole answer, after its last event."""
        assert self.finished is not None, "a stream without a last event raises"
        return WholeAnswer(
            "".join(self.texts),
            "".join(self.thoughts),
            tuple(self.calls),
            tuple(self.logprobs),
            self.reasoning_tokens,
            self.finished,
            "".join(echo.text for echo in self.echoes),
            tuple(token for echo in self.echoes for token in echo.logprobs),
        )


async def gather(opened: OpenTurn) -> WholeAnswer:
    """Read a turn to its end; raise FabricError if its node breaks off."""
    parts = AnswerParts()
    async with aclosing(opened.events()) as events:
        async for event in events:
            parts.add(event)
    return parts.whole()


def cache_headers(admitted: Admitted) -> dict[str, str]:
    """Return the headers that report which KV cache served the turn, and how much of it."""
    reason = admitted.match_reason.encode("ascii", "replace").decode()
    printable = "".join(c if c.isprintable() else " " for c in reason)
    rare = {"x-macfabric-template": "; ".join(admitted.template)} if admitted.template else {}
    if admitted.amortized_tokens:
        rare["x-macfabric-amortized-tokens"] = str(admitted.amortized_tokens)
    return {
        **rare,
        "x-macfabric-agent": admitted.agent,
        "x-macfabric-node": admitted.node,
        "x-macfabric-epoch": str(admitted.epoch),
        "x-macfabric-cache": admitted.cache.value,
        "x-macfabric-match": admitted.match.value,
        "x-macfabric-match-reason": printable[:MATCH_REASON_CHARS_MAX].strip(),
        "x-macfabric-cached-tokens": str(admitted.cached_tokens),
    }

"""A whole answer, gathered from the events of one turn, and what responses say about it."""

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
from router.turns.open_turn import Answered, OpenTurn


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """Text, reasoning, calls and counts of one finished turn."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    logprobs: tuple[TokenLogprob, ...]
    reasoning_tokens: int
    finished: Finished  # why, after how many tokens, at which stop string
    echo: str = ""  # the prompt, where it was to be told
    echo_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def mean_logprob(self) -> float:
        """How probable the answer was, by the token; of none, certain."""
        known = [each.logprob for each in self.logprobs if each.logprob is not None]
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

    def add(self, event: Answered | ToolCallPart) -> None:
        """Take the next event; parts of calls come again as whole ones."""
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
        """Put the answer together, once its last event has come."""
        assert self.finished is not None, "a stream without a last event raises"
        return WholeAnswer(
            "".join(self.texts),
            "".join(self.thoughts),
            tuple(self.calls),
            tuple(self.logprobs),
            self.reasoning_tokens,
            self.finished,
            "".join(each.text for each in self.echoes),
            tuple(told for each in self.echoes for told in each.logprobs),
        )


async def gather(opened: OpenTurn) -> WholeAnswer:
    """Read a turn to its end; raise FabricError where its node breaks off."""
    parts = AnswerParts()
    async with aclosing(opened.events()) as events:
        async for event in events:
            parts.add(event)
    return parts.whole()


def cache_headers(admitted: Admitted) -> dict[str, str]:
    """Tell whose KV cache served the turn, where, and how much of it was used."""
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

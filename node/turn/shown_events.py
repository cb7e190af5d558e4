"""What of a turn its client is told: the prompt, where it wants it again, and the answer."""

from collections.abc import Iterator, Sequence

from fabric.turn.generation import Delta, Event, TokenLogprob, ToolCallPart, ToolCalls
from node.dialect.shown import Shown
from node.engine.sequence import Sequence as EngineSequence
from node.limits import SCORED_CHUNK_TOKENS


def echo_events(sequence: EngineSequence | None) -> Iterator[Delta]:
    """Tell the prompt that is in the cache by now, with the probabilities that were asked for."""
    echo = sequence.echo if sequence is not None else None
    if sequence is None or echo is None:
        return
    sequence.echo = None  # once
    yield Delta(-1, echo.text)
    if echo.scored is None:
        return
    told = [TokenLogprob(sequence.token_text(sequence.prompt[0]), None), *echo.scored]
    for start in range(0, len(told), SCORED_CHUNK_TOKENS):
        yield Delta(-1, "", logprobs=tuple(told[start : start + SCORED_CHUNK_TOKENS]))


def shown_events(index: int, shown: Shown, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
    """Tell what came of an answer's token number `index`."""
    if shown.reasoning:
        yield Delta(index, shown.reasoning, reasoning=True)
    if shown.text or logprobs:
        yield Delta(index, shown.text, logprobs=tuple(logprobs))
    for part in shown.parts:
        yield ToolCallPart(index, part.id, part.name, part.arguments)
    if shown.calls:
        yield ToolCalls(tuple(shown.calls))

"""Increments of an answer as the client receives them."""

from dataclasses import dataclass, field

from fabric.turn.generation import ToolCall


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Increment of one call: its name and id come first, then its arguments in pieces."""

    number: int  # of the answer's calls, from 0
    id: str
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class AnswerDelta:
    """Visible text, reasoning and calls that one token adds."""

    text: str = ""
    reasoning: str = ""
    call_deltas: list[ToolCallDelta] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)  # that are complete
    stopped_by: str | None = None

"""What a client comes to see of an answer."""

from dataclasses import dataclass, field

from fabric.turn.generation import ToolCall


@dataclass(frozen=True, slots=True)
class CallPart:
    """More of a call: its name and id come first, its arguments in parts."""

    number: int  # of the answer's calls, from 0
    id: str
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Shown:
    """Visible text, reasoning and calls that one token adds."""

    text: str = ""
    reasoning: str = ""
    parts: list[CallPart] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)  # that are complete
    stopped_by: str | None = None

"""What happens in a run, in order: what bars, dashboards, journals and reports are made of."""

from dataclasses import dataclass
from typing import TypeAlias

from router.scenario.expectations import Verdict
from router.scenario.speaker import AgentCopy, TurnFigures
from router.scenario.utterance import ToolStep, TurnKey, Utterance


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """A phase has all that it waits for."""

    phase: str


@dataclass(frozen=True, slots=True)
class AgentAsked:
    """An agent is asked."""

    turn: TurnKey


@dataclass(frozen=True, slots=True)
class StepTaken:
    """An answer called tools, and has their results: the agent is asked again."""

    turn: TurnKey
    number: int
    step: ToolStep
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentSpoke:
    """An agent has spoken; `figures` are of its last answer."""

    utterance: Utterance
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentCopied:
    """An agent was made of another one's memory, or taken to another node."""

    phase: str
    agent: str
    source: str | None  # None: it was moved
    copied: AgentCopy


@dataclass(frozen=True, slots=True)
class MemoryEdited:
    """A phase's directives for one agent hold."""

    phase: str
    number: int  # of the directive in the phase
    agent: str


@dataclass(frozen=True, slots=True)
class Waited:
    """Something could not be done yet, and is tried again."""

    what: str
    why: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """All turns of a phase have ended."""

    phase: str
    verdicts: tuple[Verdict, ...]


RunEvent: TypeAlias = (
    PhaseBegan
    | AgentAsked
    | StepTaken
    | AgentSpoke
    | AgentCopied
    | MemoryEdited
    | Waited
    | PhaseEnded
)
# What a run need not do again.
Lasting: TypeAlias = StepTaken | AgentSpoke | AgentCopied | MemoryEdited

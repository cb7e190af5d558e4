"""Events of a run, in order: the input of progress bars, dashboards, journals and reports."""

from dataclasses import dataclass
from typing import TypeAlias

from router.scenario.expectations import Verdict
from router.scenario.fabric_client import AgentCopy, TurnFigures
from router.scenario.transcript import ToolStep, TurnKey, Utterance


@dataclass(frozen=True, slots=True)
class PhaseBegan:
    """Start of a phase: all phases before it have ended."""

    phase: str


@dataclass(frozen=True, slots=True)
class AgentAsked:
    """Start of an agent's turn."""

    turn: TurnKey


@dataclass(frozen=True, slots=True)
class StepTaken:
    """Answer that called tools, with their results; the agent is asked again."""

    turn: TurnKey
    number: int
    step: ToolStep
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentSpoke:
    """End of an agent's turn; `figures` are of its last answer."""

    utterance: Utterance
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentCopied:
    """Fork of an agent from another, or its move to another node."""

    phase: str
    agent: str
    source: str | None  # None: a move
    copied: AgentCopy


@dataclass(frozen=True, slots=True)
class MemoryEdited:
    """A phase's directive was added to an agent's memory."""

    phase: str
    number: int  # index of the directive in the phase
    agent: str


@dataclass(frozen=True, slots=True)
class Waited:
    """A step that failed for now and is retried or skipped."""

    what: str
    why: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class PhaseEnded:
    """End of a phase's last turn, with the verdicts on its expectations."""

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
# Events of the journal: a resumed run does not repeat these steps.
DurableEvent: TypeAlias = StepTaken | AgentSpoke | AgentCopied | MemoryEdited

"""What a run asks of a fabric, whichever way it reaches one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.turn.messages import Message
from router.scenario.scenario import TurnOptions


class AskAgainError(FabricError):
    """The fabric cannot answer now; the same asked again later does no harm."""

    code = "ask_again"

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Question:
    """One answer that is wanted of an agent."""

    agent: AgentId
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    options: TurnOptions


@dataclass(frozen=True, slots=True)
class WantedCall:
    """A tool that an answer calls; text in place of arguments that are no object."""

    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """What one answer cost; `ttft_s` is from the question to its first token."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    node: str
    cache: str  # the tier that its memory came from


@dataclass(frozen=True, slots=True)
class SpokenAnswer:
    """What an agent answered, as it was generated."""

    text: str
    calls: tuple[WantedCall, ...]
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentCopy:
    """Where an agent is since it was forked or moved, and the bytes that were sent for it."""

    node: str
    sent_bytes: int


class ScenarioSpeaker(Protocol):
    """Every call raises AskAgainError, or another FabricError that no repetition mends."""

    async def ask(self, question: Question) -> SpokenAnswer:
        """Return an agent's answer."""
        ...

    async def fork(
        self, source: AgentId, copy: AgentId, to: str | None, op: OperationId
    ) -> AgentCopy:
        """Make an agent that begins with the memory of another; repeatable."""
        ...

    async def direct(
        self, agent: AgentId, items: Sequence[Mapping[str, Any]], op: OperationId
    ) -> None:
        """Edit an agent's memory from now on; repeatable."""
        ...

    async def move(self, agent: AgentId, to: str) -> AgentCopy:
        """Move an agent to a node."""
        ...

    async def nodes(self) -> tuple[str, ...]:
        """Name the nodes that take agents."""
        ...

    async def prefetch(self, agent: AgentId) -> None:
        """Bring an agent's memory where its next turn finds it at once; it may be nowhere yet."""
        ...

    async def erase(self, agent: AgentId) -> None:
        """Remove an agent and its memory; it may be nowhere."""
        ...

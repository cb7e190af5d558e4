"""What a run asks of a fabric, whichever way it reaches one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.turn.messages import Message
from router.scenario.scenario import TurnOptions

WAIT_S: Final = 1.0  # before something is tried again of which the fabric does not say when
RUN_EDITS: Final = "scn-"  # begins the operations of runs, so that they know their own
OWNER_LOST: Final = "owner_lost"  # the code of a refusal that the agent's next turn ends


class AskAgainError(FabricError):
    """The fabric cannot answer now; the same asked again later does no harm."""

    code = "ask_again"

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class MemoryLostError(AskAgainError):
    """The agent's node is lost without a current replica: its next turn begins it elsewhere."""

    code = "memory_lost"


def later_error(message: str, wait_s: float, code: str | None) -> AskAgainError:
    """Return the error for a refusal that may pass, by the fabric's code for it."""
    kind = MemoryLostError if code == OWNER_LOST else AskAgainError
    return kind(message, wait_s)


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
    id: str = ""  # as the fabric has it: directives name a call's result by it


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Cost of one answer; `ttft_s` is from the question to its first token."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    node: str
    cache: str  # the tier that its memory came from


@dataclass(frozen=True, slots=True)
class SpokenAnswer:
    """Answer of an agent, as it was generated."""

    text: str
    calls: tuple[WantedCall, ...]
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentCopy:
    """Node of an agent after a fork or a move, and the bytes sent for it."""

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

    async def edits(self, agent: AgentId) -> frozenset[OperationId] | None:
        """Return the operations of runs whose edits an agent holds; None where no node has it."""
        ...

    async def take_back(self, agent: AgentId) -> bool:
        """Undo what runs have edited of an agent's memory, if it is anywhere; say if any was."""
        ...

    async def move(self, agent: AgentId, to: str) -> AgentCopy:
        """Move an agent to a node."""
        ...

    async def nodes(self) -> tuple[str, ...]:
        """Name the nodes that take agents."""
        ...

    async def owners(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return the nodes where agents are now; those that are nowhere are left out."""
        ...

    async def prefetch(self, agent: AgentId) -> None:
        """Bring an agent's memory where its next turn finds it at once; it may be nowhere yet."""
        ...

    async def erase(self, agent: AgentId) -> None:
        """Remove an agent and its memory; it may be nowhere."""
        ...


def edits_of_runs(operations: Iterable[str]) -> tuple[OperationId, ...]:
    """Choose what runs have done among an agent's operations, each once."""
    own = (each for each in dict.fromkeys(operations) if each.startswith(RUN_EDITS))
    return tuple(map(OperationId, own))


def read_arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as the model wrote them."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are not JSON: journals could not hold them

"""Interface between a scenario run and the fabric that answers it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol

from fabric.errors import FabricError
from fabric.ids import AgentId, OperationId
from fabric.turn.messages import Message
from router.scenario.scenario import TurnOptions

RETRY_WAIT_S: Final = 1.0  # where the fabric names no time
RUN_OPERATION_PREFIX: Final = "scn-"  # marks the operations of runs among an agent's directives
OWNER_LOST: Final = "owner_lost"  # code of a refusal that the agent's next turn resolves


class AskAgainError(FabricError):
    """A temporary refusal: the same call may be repeated safely."""

    code = "ask_again"

    def __init__(self, message: str, wait_s: float) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class MemoryLostError(AskAgainError):
    """Loss of an agent's node without a current replica: its next turn restarts it elsewhere."""

    code = "memory_lost"


def temporary_error(message: str, wait_s: float, code: str | None) -> AskAgainError:
    """Return the error for a temporary refusal with one of the fabric's codes."""
    kind = MemoryLostError if code == OWNER_LOST else AskAgainError
    return kind(message, wait_s)


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt of an agent's turn, with its tools and options."""

    agent: AgentId
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    options: TurnOptions


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """Tool call of an answer; arguments that are not a JSON object stay text."""

    name: str
    arguments: dict[str, Any] | str
    id: str = ""  # the fabric's: directives name a call's result by it


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Cost of one answer; `ttft_s` is the time from the question to the first token."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    total_s: float
    node: str
    cache: str  # tier that the cached prefix was read from


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Answer of an agent, as it was generated."""

    text: str
    calls: tuple[RequestedCall, ...]
    figures: TurnFigures


@dataclass(frozen=True, slots=True)
class AgentCopy:
    """Node of an agent after a fork or a move, and the bytes sent for it."""

    node: str
    sent_bytes: int


class FabricClient(Protocol):
    """Calls that a run makes; each raises AskAgainError, or FabricError for a final refusal."""

    async def ask(self, question: Question) -> AgentAnswer:
        """Return an agent's answer."""
        ...

    async def fork(
        self, source: AgentId, copy: AgentId, to: str | None, op: OperationId
    ) -> AgentCopy:
        """Create an agent with the memory of another; repeatable."""
        ...

    async def direct(
        self, agent: AgentId, items: Sequence[Mapping[str, Any]], op: OperationId
    ) -> None:
        """Add directives to an agent's memory; repeatable."""
        ...

    async def run_edits(self, agent: AgentId) -> frozenset[OperationId] | None:
        """Return the operations of runs among an agent's directives; None if no node has it."""
        ...

    async def undo_edits(self, agent: AgentId) -> bool:
        """Undo the directives of runs, if any node has the agent; return whether it had any."""
        ...

    async def move(self, agent: AgentId, to: str) -> AgentCopy:
        """Move an agent to a node."""
        ...

    async def nodes(self) -> tuple[str, ...]:
        """Return the names of the nodes that accept agents."""
        ...

    async def owners(self, agents: Sequence[AgentId]) -> dict[AgentId, str]:
        """Return the nodes that own agents; agents without an owner are left out."""
        ...

    async def prefetch(self, agent: AgentId) -> None:
        """Load an agent's memory for its next turn, if it exists."""
        ...

    async def erase(self, agent: AgentId) -> None:
        """Erase an agent and its memory, if it exists."""
        ...


def run_operations(operations: Iterable[str]) -> tuple[OperationId, ...]:
    """Return the distinct operations that runs have made, in order."""
    distinct = (op for op in dict.fromkeys(operations) if op.startswith(RUN_OPERATION_PREFIX))
    return tuple(map(OperationId, distinct))


def read_arguments(text: str) -> dict[str, Any] | str:
    """Return a call's arguments as an object, or as the model wrote them."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are not JSON: journals could not store them

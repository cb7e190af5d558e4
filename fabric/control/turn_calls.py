"""Control messages for the history of an agent's turns."""

from dataclasses import dataclass

from fabric.control.agent_at import AgentName
from fabric.record.turn_history import TurnNote


@dataclass(frozen=True, slots=True)
class ReadTurns(AgentName):
    """Request for the history of an agent's turns."""


@dataclass(frozen=True, slots=True)
class TurnsView:
    """Last turns of an agent, the oldest first."""

    turns: tuple[TurnNote, ...]

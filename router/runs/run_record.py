"""What the router's disk has of a run: how it was asked for, and how it ended."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.scenario.script import Script
from router.scenario.series import SeriesPlan

FORMAT = 1


class RunStatus(StrEnum):
    """Progress of a run."""

    RUNNING = "running"  # also while the router is down: it goes on
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"  # it could not go on, and says why


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run as it was asked for; enough to go on with it in another process."""

    tenant: str
    name: str
    key: str  # operations are named after it: a run of the same name is another one
    created_s: float
    scenario: str
    title: str | None
    turns_total: int  # of all performances
    arm_turns: int  # of one
    agents: tuple[str, ...]  # all that take part, by their ids
    model: str
    digest: str  # of its script, which lies beside it
    namespace: str
    repeats: int
    is_compared: bool
    format: int = FORMAT

    def plan(self, script: Script) -> SeriesPlan:
        """Read the scenario again; raise RejectedError where this version reads it otherwise."""
        scenario = script.read()
        return SeriesPlan(
            scenario, self.name, self.digest, self.namespace, self.repeats, self.is_compared
        )

    def is_alike(self, other: "RunRecord") -> bool:
        """Say whether another one asks for the same."""
        return self._wanted() == other._wanted()  # noqa: SLF001 - of its own kind

    def shares_agents(self, other: "RunRecord") -> bool:
        """Say whether one agent would take part in both."""
        return self.tenant == other.tenant and not set(self.agents).isdisjoint(other.agents)

    def _wanted(self) -> tuple[Any, ...]:
        return (self.digest, self.model, self.namespace, self.repeats, self.is_compared)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run; `code` and `message` of one that failed."""

    status: RunStatus
    ended_s: float
    turns_done: int
    holds: bool | None = None  # None: not all was said
    code: str | None = None
    message: str | None = None

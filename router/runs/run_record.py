"""Records of a run on disk: its request and its end."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from router.scenario.series import SeriesPlan
from router.scenario.source import ScenarioSource

FORMAT = 1


class RunStatus(StrEnum):
    """Progress of a run."""

    RUNNING = "running"  # also while the router is down
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"  # with an error


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Request of a run, sufficient to resume it in another process."""

    tenant: str
    name: str
    key: str  # random part of operations' ids: a later run may have the same name
    created_s: float
    scenario: str
    title: str | None
    turns_total: int  # of all arms
    arm_turns: int  # of one
    agents: tuple[str, ...]  # ids of all agents that take part
    model: str
    digest: str  # of its source
    namespace: str
    repeats: int
    is_compared: bool
    format: int = FORMAT

    def plan(self, source: ScenarioSource) -> SeriesPlan:
        """Read the scenario and plan its arms; raise RejectedError if this version refuses it."""
        scenario = source.read()
        return SeriesPlan(
            scenario, self.name, self.digest, self.namespace, self.repeats, self.is_compared
        )

    def is_alike(self, other: "RunRecord") -> bool:
        """Return whether two records request the same run."""
        return self._request() == other._request()  # noqa: SLF001 - of the same class

    def shares_agents(self, other: "RunRecord") -> bool:
        """Return whether an agent takes part in both runs."""
        return self.tenant == other.tenant and not set(self.agents).isdisjoint(other.agents)

    def _request(self) -> tuple[Any, ...]:
        return (self.digest, self.model, self.namespace, self.repeats, self.is_compared)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run, with the error code and message of a failed one."""

    status: RunStatus
    ended_s: float
    turns_done: int
    holds: bool | None = None  # None: not all turns have ended
    code: str | None = None
    message: str | None = None

"""Series of a run: a scenario's arms, warm and cold, their repetitions, and their agents' ids."""

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Final

from fabric.errors import RejectedError
from fabric.ids import AgentId, parse_agent_id
from router.limits import SCENARIO_KEY_CHARS_MAX
from router.scenario.diagnostics import shorten
from router.scenario.fabric_client import FabricClient
from router.scenario.journal import JournalHead, RunJournal, run_in_thread
from router.scenario.run import ScenarioRun
from router.scenario.run_events import DurableEvent, RunEvent
from router.scenario.run_state import RunState
from router.scenario.scenario import Lifetime, Scenario

_RUN = re.compile(rf"[a-z0-9][a-z0-9_-]{{0,{SCENARIO_KEY_CHARS_MAX - 1}}}")


def agent_id(scenario: Scenario, agent: str, run: str, namespace: str = "") -> AgentId:
    """Return an agent's id: the same in all runs of a namespace, or of this run only.

    Args:
        scenario: its name is part of the id.
        agent: its key in the scenario.
        run: the run's name.
        namespace: separates the permanent agents of one series of runs from others'.
    """
    require_run_name(run)
    if namespace:
        require_run_name(namespace, "as")
    place = f"{scenario.name}@{namespace}" if namespace else scenario.name
    if scenario.agents[agent].lifetime is Lifetime.EPHEMERAL:
        place = f"{place}.{run}"
    return parse_agent_id(f"scn.{place}.{agent}")


def require_run_name(name: str, param: str = "run") -> None:
    """Raise RejectedError for an invalid name of a run or a series."""
    if not _RUN.fullmatch(name):
        rule = f"use lower-case letters, digits, _ and -, {SCENARIO_KEY_CHARS_MAX} at most"
        message = f"'{shorten(name)}' is not a valid name: {rule}"
        raise RejectedError(message, code="invalid_value", param=param)


COLD = "cold"  # agents are erased before each phase
WARM = "warm"
_KEY_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """One repetition of a run, warm or cold; numbers count from 1."""

    number: int
    kind: str


@dataclass(frozen=True, slots=True)
class ArmRun:
    """An arm that has ended or is running."""

    arm: Arm
    run: ScenarioRun


@dataclass(frozen=True, slots=True)
class SeriesPlan:
    """Scenario, repetitions and agents of a series."""

    scenario: Scenario
    name: str
    digest: str
    namespace: str = ""
    repeats: int = 1
    is_compared: bool = False

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Arms in order; cold and warm alternate, so that both meet the same conditions."""
        kinds = (COLD, WARM) if self.is_compared else (WARM,)
        return tuple(Arm(n, kind) for n in range(1, self.repeats + 1) for kind in kinds)

    @property
    def erases_agents(self) -> bool:
        """Return whether agents are erased before each arm, so that none profits from another."""
        return self.repeats > 1 or self.is_compared

    @property
    def turns(self) -> int:
        """Number of turns of one arm."""
        return sum(len(list(phase.turns)) for phase in self.scenario.phases)

    def ids(self, arm: Arm) -> dict[str, AgentId]:
        """Return the fabric's ids of an arm's agents; raise RejectedError for a bad name."""
        parts = [self.namespace, COLD if arm.kind == COLD else ""]
        namespace = "-".join(part for part in parts if part)
        name = self.name_of(arm)
        return {a: agent_id(self.scenario, a, name, namespace) for a in self.scenario.agents}

    def name_of(self, arm: Arm) -> str:
        return self.name if self.repeats == 1 else f"{self.name}-{arm.number}"

    def journal(self, folder: Path, arm: Arm) -> Path:
        return folder / f"{self.name_of(arm)}{'.cold' if arm.kind == COLD else ''}.jsonl"

    def head(self, arm: Arm) -> JournalHead:
        return JournalHead(self.name_of(arm), self.scenario.name, self.digest)


# Returns the receiver of an arm's events, given its state and the events of earlier processes.
Watch = Callable[
    [Arm, RunState, Sequence[DurableEvent]], AbstractContextManager[Callable[[RunEvent], None]]
]


@dataclass(slots=True)
class Series:
    """Runs a plan's arms, each from the end of its journal."""

    plan: SeriesPlan
    client: FabricClient
    folder: Path
    watch: Watch
    key: str = ""  # part of operations' ids in new journals; random by default
    arm_runs: list[ArmRun] = field(default_factory=list)  # the last one may be running

    async def run(self) -> None:
        """Run all arms; raise FabricError where one cannot continue."""
        for arm in self.plan.arms:
            await self._run_arm(arm)

    async def end_agents(self) -> None:
        """Erase the agents of a cancelled or failed run."""
        for each in self.arm_runs:
            await each.run.end_agents()

    async def _run_arm(self, arm: Arm) -> None:
        plan = self.plan
        ids = plan.ids(arm)
        journal = await self._open_journal(arm)
        try:
            state = RunState.of(plan.scenario, journal.events)
            with self.watch(arm, state, journal.events) as report:
                key = journal.key or self.key  # older journals: the run's name
                name = f"{key}{arm.kind}{arm.number}" if key else plan.name_of(arm) + arm.kind
                run = ScenarioRun(name, state, self.client, journal, ids.__getitem__, report,
                                  begins_cold=arm.kind == COLD)  # fmt: skip
                self.arm_runs.append(ArmRun(arm, run))
                if plan.erases_agents and not journal.events:
                    # Of both arms: prefixes are shared between agents.
                    for kind in (WARM, COLD):
                        await run.erase(plan.ids(Arm(arm.number, kind)).values())
                elif not plan.erases_agents:
                    await run.undo_edits()
                await run.run()
                await run.end_agents()
        finally:
            journal.close()

    async def _open_journal(self, arm: Arm) -> RunJournal:
        opening = asyncio.create_task(run_in_thread(partial(self._journal, arm)))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            (await opening).close()  # no one else will
            raise

    def _journal(self, arm: Arm) -> RunJournal:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        head = replace(self.plan.head(arm), key=self.key or token_hex(_KEY_BYTES))
        return RunJournal(self.plan.journal(self.folder, arm), head)

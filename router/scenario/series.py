"""A run as it is asked for: a scenario performed as often, and in as many arms, as is wanted."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Final

from fabric.ids import AgentId
from router.scenario.agent_ids import agent_id
from router.scenario.journal import JournalHead, RunJournal
from router.scenario.run import ScenarioRun
from router.scenario.run_events import Lasting, RunEvent
from router.scenario.run_state import RunState
from router.scenario.scenario import Scenario
from router.scenario.speaker import ScenarioSpeaker
from router.scenario.work import beside

COLD = "cold"  # the arm whose agents are erased before each phase
WARM = "warm"
_KEY_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """One performance among those of a run; numbers count from 1."""

    number: int
    kind: str


@dataclass(frozen=True, slots=True)
class Performed:
    """A performance that has ended, or is under way."""

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
        """All performances in order; arms take turns, so that both meet the same machine."""
        kinds = (COLD, WARM) if self.is_compared else (WARM,)
        return tuple(Arm(n, kind) for n in range(1, self.repeats + 1) for kind in kinds)

    @property
    def begins_anew(self) -> bool:
        """Say whether agents are erased before each performance, so that none profits."""
        return self.repeats > 1 or self.is_compared

    @property
    def turns(self) -> int:
        """Count the turns of one performance."""
        return sum(len(list(phase.turns)) for phase in self.scenario.phases)

    def ids(self, arm: Arm) -> dict[str, AgentId]:
        """Return by which ids the fabric knows the agents; raise RejectedError for a bad name."""
        parts = [self.namespace, COLD if arm.kind == COLD else ""]
        namespace = "-".join(part for part in parts if part)
        name = self.name_of(arm)
        return {a: agent_id(self.scenario, a, name, namespace) for a in self.scenario.agents}

    def used_ids(self, arm: Arm) -> tuple[AgentId, ...]:
        """Return the ids that must be this run's alone while an arm is performed."""
        kinds = (COLD, WARM) if self.is_compared else (WARM,)
        used = (self.ids(Arm(arm.number, kind)).values() for kind in kinds)
        return tuple(dict.fromkeys(agent for ids in used for agent in ids))

    def name_of(self, arm: Arm) -> str:
        return self.name if self.repeats == 1 else f"{self.name}-{arm.number}"

    def journal(self, folder: Path, arm: Arm) -> Path:
        return folder / f"{self.name_of(arm)}{'.cold' if arm.kind == COLD else ''}.jsonl"

    def head(self, arm: Arm) -> JournalHead:
        return JournalHead(self.name_of(arm), self.scenario.name, self.digest)


# Who watches one performance: from what was done before on, each event as it comes.
Watch = Callable[
    [Arm, RunState, Sequence[Lasting]], AbstractContextManager[Callable[[RunEvent], None]]
]


@dataclass(slots=True)
class Series:
    """Performs a plan, and goes on with it where its journals end."""

    plan: SeriesPlan
    speaker: ScenarioSpeaker
    folder: Path
    watch: Watch
    key: str = ""  # operations of new journals are named after it; a random one by default
    performed: list[Performed] = field(default_factory=list)  # the last may be under way

    async def perform(self) -> None:
        """Perform each run; raise FabricError where one cannot go on."""
        for arm in self.plan.arms:
            await self._perform(arm)

    async def end_agents(self) -> None:
        """Erase the agents of a run that is given up, also those of a performance under way."""
        for each in self.performed:
            await each.run.end_agents()

    async def _perform(self, arm: Arm) -> None:
        plan = self.plan
        ids = plan.ids(arm)
        journal = await self._opened(arm)
        try:
            state = RunState.of(plan.scenario, journal.events)
            with self.watch(arm, state, journal.events) as tell:
                key = journal.key or self.key  # of older journals: the run's name
                name = f"{key}{arm.kind}{arm.number}" if key else plan.name_of(arm) + arm.kind
                run = ScenarioRun(name, state, self.speaker, journal, ids.__getitem__, tell,
                                  begins_cold=arm.kind == COLD)  # fmt: skip
                self.performed.append(Performed(arm, run))
                if plan.begins_anew and not journal.events:
                    # Of both arms: a prompt may begin with anybody's memory.
                    for kind in (WARM, COLD):
                        await run.erase(plan.ids(Arm(arm.number, kind)).values())
                elif not plan.begins_anew:
                    await run.take_back()
                await run.perform()
                await run.end_agents()
        finally:
            journal.close()

    async def _opened(self, arm: Arm) -> RunJournal:
        opening = asyncio.create_task(beside(partial(self._journal, arm)))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            (await opening).close()  # it is nobody's by now
            raise

    def _journal(self, arm: Arm) -> RunJournal:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        head = replace(self.plan.head(arm), key=self.key or token_hex(_KEY_BYTES))
        return RunJournal(self.plan.journal(self.folder, arm), head)

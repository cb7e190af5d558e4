"""One performance of a scenario: whoever may speak is asked, until all has been said.

    state ─▶ due turns ─▶ begin their phases: forks, directives ─▶ ask ─▶ tools ─▶ ask … ─▶ journal
      ▲                                                                                       │
      └───────────────────────────────────────────────────────────────────────────────────────┘

A run keeps nothing but what its journal has, so that one that broke off goes on behind its last
line, and asks nobody twice.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from fabric.errors import FabricError
from fabric.ids import AgentId
from router.limits import (
    SCENARIO_ASKING_MAX,
    SCENARIO_LOST_TRIES_MAX,
    SCENARIO_PREFETCHED_MAX,
    SCENARIO_STEPS_MAX,
    SCENARIO_TRIES_MAX,
)
from router.scenario.conversation import prompt
from router.scenario.expectations import Verdict, judged
from router.scenario.given_edits import GivenEdits, digest, operation_id
from router.scenario.placing import wished_node
from router.scenario.run_events import (
    AgentAsked,
    AgentCopied,
    AgentSpoke,
    Lasting,
    MemoryEdited,
    PhaseBegan,
    PhaseEnded,
    RunEvent,
    StepTaken,
    Waited,
)
from router.scenario.run_state import RunState
from router.scenario.scenario import Lifetime, Phase, Scenario
from router.scenario.speaker import (
    AskAgainError,
    MemoryLostError,
    Question,
    ScenarioSpeaker,
    SpokenAnswer,
)
from router.scenario.tool_answers import answer_call, offered_tools
from router.scenario.utterance import AnsweredCall, Said, ToolStep, TurnKey, Utterance
from router.scenario.work import beside

_T = TypeVar("_T")
_CALL_ID_BYTES = 6


class Journal(Protocol):
    """Journal of a run."""

    def note(self, event: Lasting) -> None:
        """Write an event down, from any thread; it lasts when this returns. Raise OSError."""
        ...


class ScenarioRun:
    """Performs one scenario, from where its state is."""

    def __init__(
        self,
        name: str,
        state: RunState,
        speaker: ScenarioSpeaker,
        journal: Journal,
        agent_ids: Callable[[str], AgentId],
        tell: Callable[[RunEvent], None],
        *,
        begins_cold: bool = False,
    ) -> None:
        """Prepare it.

        Args:
            name: the run's own; operations that must not be done twice are named after it.
            state: what was done before.
            speaker: the fabric.
            journal: is told what lasts, before anybody else.
            agent_ids: by which id the fabric knows an agent.
            tell: is told everything, as it happens.
            begins_cold: all agents are erased before each phase, and nothing is edited or forked:
                what that costs is compared.
        """
        self.state = state
        self.verdicts: dict[str, tuple[Verdict, ...]] = {}
        self._name = name
        self._speaker = speaker
        self._journal = journal
        self._id_of = agent_ids
        self._edits = GivenEdits(name, state, speaker, agent_ids)
        self._tell = tell
        self._begins_cold = begins_cold
        self._asking = asyncio.Semaphore(SCENARIO_ASKING_MAX)
        self._begun: dict[str, asyncio.Task[None]] = {}
        self._prefetching: dict[str, asyncio.Task[None]] = {}

    @property
    def scenario(self) -> Scenario:
        return self.state.scenario

    async def erase(self, agents: Iterable[AgentId]) -> None:
        """Begin from nothing, whatever permanent agents remember of earlier runs."""
        for agent in agents:
            await self._insist(f"erasing {agent}", partial(self._speaker.erase, agent))

    async def end_agents(self) -> None:
        """Erase the agents that no later run uses; what the fabric refuses is only reported."""
        for agent, role in self.scenario.agents.items():
            if self._begins_cold or role.lifetime is Lifetime.EPHEMERAL:
                try:
                    await self._speaker.erase(self._id_of(agent))
                except FabricError as error:
                    what = f"{self._id_of(agent)} is not erased"
                    self._tell(Waited(what, error.message, 0.0))

    async def take_back(self) -> None:
        """Undo what earlier runs have edited of permanent agents that did nothing in this one.

        Where an agent's node is lost, that is done before its first answer counts.
        """
        edited = {edit.agent for phase in self.scenario.phases
                  for number, edit in enumerate(phase.directives)
                  if (phase.id, number) in self.state.edits}  # fmt: skip
        for agent, role in self.scenario.agents.items():
            has_acted = self.state.node_of(agent) is not None or agent in edited
            if role.lifetime is not Lifetime.PERMANENT or has_acted:
                continue
            what = f"undoing earlier edits of {agent}"
            work = partial(self._speaker.take_back, self._id_of(agent))
            try:
                await self._insist(what, work, needs_memory=True)
            except MemoryLostError as error:
                why = f"{error.message}; undone once a node has it, before its next answer counts"
                self._tell(Waited(what, why, 0.0))
                self._edits.uncleared.add(agent)

    async def perform(self) -> None:
        """Go on until all has been said; raise FabricError where the fabric refuses for good."""
        under_way: dict[TurnKey, asyncio.Task[None]] = {}
        await self._judge()
        try:
            while due := self.state.turns.next(self.state.said):
                for turn in due:
                    if turn not in under_way:
                        under_way[turn] = asyncio.create_task(self._turn(turn))
                self._prefetch({turn.speaker for turn in under_way})
                done, _ = await asyncio.wait(
                    under_way.values(), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
                under_way = {turn: task for turn, task in under_way.items() if task not in done}
                await self._judge()
        finally:
            await _end([*under_way.values(), *self._begun.values(), *self._prefetching.values()])

    # --- a phase -----------------------------------------------------------------------------

    async def _begin(self, phase: Phase) -> None:
        """Do what comes before a phase's first turn, once."""
        self._tell(PhaseBegan(phase.id))
        has_begun = _has_spoken(phase, self.state.said)
        if self._begins_cold and not has_begun:
            await self.erase(map(self._id_of, self._idle()))
        for copy in phase.fork.copies if phase.fork is not None else ():
            is_made = self.state.was_forked(phase.id, copy) or _has_spoken(
                phase, self.state.said, copy
            )
            if not self._begins_cold and not is_made:
                assert phase.fork is not None, "its copies are listed"
                await self._fork(phase, phase.fork.source, copy)
        for number, edit in enumerate(phase.directives):
            if (phase.id, number) not in self.state.edits and not self._begins_cold:
                await self._edit(phase, number, edit.agent)

    async def _edit(self, phase: Phase, number: int, agent: str) -> None:
        """Edit an agent's memory, or leave it to the check after its next answer."""
        what = f"editing the memory of {self._located(agent)}"
        try:
            give = partial(self._edits.give, agent, phase, number)
            await self._insist(what, give, needs_memory=True)
        except AskAgainError as error:
            why = f"{error.message}; edited once a node has it, before its next answer counts"
            self._tell(Waited(what, why, 0.0))
        await self._note(MemoryEdited(phase.id, number, agent))

    def _idle(self) -> list[str]:
        """Name who takes part in no phase under way: a prompt may begin with anybody's memory."""
        under_way = [phase for phase in self.scenario.phases if self._is_under_way(phase)]
        busy = {agent for phase in under_way for agent in phase.agents}
        return [agent for agent in self.scenario.agents if agent not in busy]

    def _is_under_way(self, phase: Phase) -> bool:
        """Say whether somebody of a phase was asked, maybe before this run went on, or soon is."""
        begun, said = self._begun.get(phase.id), self.state.said
        has_begun = _has_spoken(phase, said) or (begun is not None and begun.done())
        return has_begun and not self.state.turns.has_ended(phase.id, said)

    async def _fork(self, phase: Phase, source: str, copy: str) -> None:
        """Copy an agent's memory; where that cannot be had, its prompt is computed instead."""
        op = operation_id(self._name, "fork", phase.id, copy)
        to = await self._wished_node(copy)
        await self._insist(f"erasing {copy}", lambda: self._speaker.erase(self._id_of(copy)))
        what = f"forking {self._located(source)} as {copy}"
        try:
            copied = await self._insist(
                what,
                lambda: self._speaker.fork(self._id_of(source), self._id_of(copy), to, op),
                needs_memory=True,
            )
        except AskAgainError as error:
            why = f"{error.message}; {copy} computes that memory anew"
            self._tell(Waited(what, why, 0.0))
            return
        await self._note(AgentCopied(phase.id, copy, source, copied))

    async def _wished_node(self, agent: str) -> str | None:
        """Name the node that an agent should move to; None where it is best left alone."""
        if self.scenario.agents[agent].place is None:
            return None
        find = partial(wished_node, self.scenario, agent, self._speaker, self._id_of)
        return await self._insist(f"placing {agent}", find)

    async def _judge(self) -> None:
        """Judge each phase that has ended since."""
        for phase in self.scenario.phases:
            said = self.state.said
            if phase.id not in self.verdicts and self.state.turns.has_ended(phase.id, said):
                figures = self.state.prompt_figures()
                found = await beside(partial(judged, self.scenario, phase.id, said, figures))
                self.verdicts[phase.id] = found
                self._tell(PhaseEnded(phase.id, found))

    # --- a turn ------------------------------------------------------------------------------

    async def _turn(self, turn: TurnKey) -> None:
        phase = self.scenario.phase(turn.phase)
        if phase.id not in self._begun:
            self._begun[phase.id] = asyncio.create_task(self._begin(phase))
        await asyncio.shield(self._begun[phase.id])
        loading = self._prefetching.pop(turn.speaker, None)
        if loading is not None:
            await asyncio.wait([loading])
        self._tell(AgentAsked(turn))
        was_there = self.state.node_of(turn.speaker) is not None
        while True:
            steps = tuple(self.state.steps[turn])
            answer = await self._answer(turn, steps)
            if not answer.calls or len(steps) == SCENARIO_STEPS_MAX:
                break
            step = self._step(turn, len(steps), answer)
            await self._note(StepTaken(turn, len(steps), step, answer.figures))
        utterance = Utterance(turn.phase, turn.round, turn.speaker, answer.text, steps)
        await self._note(AgentSpoke(utterance, answer.figures))
        if not was_there:
            await self._settle(turn)

    async def _answer(self, turn: TurnKey, steps: tuple[ToolStep, ...]) -> SpokenAnswer:
        scenario = self.scenario
        question = Question(
            self._id_of(turn.speaker),
            await beside(partial(prompt, scenario, self.state.said, turn, steps)),
            tuple(offered_tools(scenario, turn.speaker)),
            scenario.options(turn.speaker),
        )
        async with self._asking:
            asking = partial(self._edited_answer, turn.speaker, question)
            return await self._insist(f"asking {self._located(turn.speaker)}", asking)

    async def _edited_answer(self, agent: str, question: Question) -> SpokenAnswer:
        """Ask an agent; raise AskAgainError for an answer without the edits that it was given."""
        answer = await self._speaker.ask(question)
        wrong = "" if self._begins_cold else await self._edits.restore(agent)
        if wrong:
            raise AskAgainError(wrong, 0.0)
        return answer

    def _step(self, turn: TurnKey, number: int, answer: SpokenAnswer) -> ToolStep:
        """Answer the calls of an answer; one without an id gets the same whenever it is made."""
        calls = []
        for index, call in enumerate(answer.calls):
            result = answer_call(self.scenario, turn.speaker, call.name, call.arguments)
            place = (turn.phase, str(turn.round), turn.speaker, str(number), str(index))
            name = call.id or f"call_{digest(_CALL_ID_BYTES, *place)}"
            calls.append(AnsweredCall(name, call.name, call.arguments, result))
        return ToolStep(tuple(calls), answer.text)

    async def _settle(self, turn: TurnKey) -> None:
        """Take an agent where it would best live, once it is there; a wish, and no more."""
        to = await self._wished_node(turn.speaker)
        if to is None:
            return
        try:
            copied = await self._speaker.move(self._id_of(turn.speaker), to)
        except FabricError as error:
            self._tell(Waited(f"{turn.speaker} stays where it is", str(error), 0.0))
        else:
            await self._note(AgentCopied(turn.phase, turn.speaker, None, copied))

    def _prefetch(self, busy: set[str]) -> None:
        """Have those who speak soon ready."""
        coming = self.state.turns.to_come(self.state.said, SCENARIO_PREFETCHED_MAX)
        for agent in {turn.speaker: None for turn in coming}:
            known = self.state.node_of(agent) is not None and not self._begins_cold
            if known and agent not in busy and agent not in self._prefetching:
                self._prefetching[agent] = asyncio.create_task(self._prefetched(agent))

    async def _prefetched(self, agent: str) -> None:
        try:
            await self._speaker.prefetch(self._id_of(agent))
        except FabricError as error:  # its turn loads it as well
            self._tell(Waited(f"prefetch of {agent}", str(error), 0.0))

    # --- all of them -------------------------------------------------------------------------

    async def _note(self, event: Lasting) -> None:
        await beside(partial(self._journal.note, event))
        self.state.note(event)
        self._tell(event)

    async def _insist(
        self, what: str, work: Callable[[], Awaitable[_T]], *, needs_memory: bool = False
    ) -> _T:
        """Try until it is done; raise AskAgainError after SCENARIO_TRIES_MAX tries.

        Work that needs an agent's memory, and takes no turn, is tried a few times only once that
        is lost: raise MemoryLostError.
        """
        number = 0
        while True:
            number += 1
            try:
                return await work()
            except AskAgainError as error:
                is_lost = needs_memory and isinstance(error, MemoryLostError)
                if number >= (SCENARIO_LOST_TRIES_MAX if is_lost else SCENARIO_TRIES_MAX):
                    message = f"{what}: tried {number} times: {error.message}"
                    kind = MemoryLostError if is_lost else AskAgainError
                    raise kind(message, error.wait_s) from None
                self._tell(Waited(what, error.message, error.wait_s))
                await asyncio.sleep(error.wait_s)

    def _located(self, agent: str) -> str:
        node = self.state.node_of(agent)
        return agent if node is None else f"{agent} (last on {node})"


def _has_spoken(phase: Phase, said: Said, agent: str | None = None) -> bool:
    return any(turn.phase == phase.id and agent in (None, turn.speaker) for turn in said)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

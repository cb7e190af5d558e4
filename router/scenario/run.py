"""Arm of a scenario run: ask agents whose turns are due, until all turns have ended.

    state ─▶ due turns ─▶ begin their phases: forks, directives ─▶ ask ─▶ tools ─▶ ask … ─▶ journal
      ▲                                                                                       │
      └───────────────────────────────────────────────────────────────────────────────────────┘

The journal holds a run's whole state, so a resumed run continues after the last line and repeats no
finished turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from fabric.errors import FabricError
from fabric.ids import AgentId
from router.limits import (
    SCENARIO_CONCURRENT_TURNS_MAX,
    SCENARIO_LOST_TRIES_MAX,
    SCENARIO_PREFETCHED_MAX,
    SCENARIO_STEPS_MAX,
    SCENARIO_TRIES_MAX,
)
from router.scenario.conversation import prompt
from router.scenario.expectations import Verdict, judge_phase
from router.scenario.fabric_client import (
    AgentAnswer,
    AskAgainError,
    FabricClient,
    MemoryLostError,
    Question,
)
from router.scenario.journal import run_in_thread
from router.scenario.memory_edits import RunEdits, digest, operation_id
from router.scenario.run_events import (
    AgentAsked,
    AgentCopied,
    AgentSpoke,
    DurableEvent,
    MemoryEdited,
    PhaseBegan,
    PhaseEnded,
    RunEvent,
    StepTaken,
    Waited,
)
from router.scenario.run_state import RunState
from router.scenario.scenario import Lifetime, Phase, PlaceHint, Scenario
from router.scenario.tool_answers import answer_call, offered_tools
from router.scenario.transcript import AnsweredCall, RunTranscript, ToolStep, TurnKey, Utterance


async def preferred_node(
    scenario: Scenario, agent: str, client: FabricClient, id_of: Callable[[str], AgentId]
) -> str | None:
    """Return the node that an agent should move to, or be created on; None: do not move it."""
    place = scenario.agents[agent].place
    if place is None:
        return None
    nodes = await client.nodes()
    others = [id_of(other) for other in (*(place.apart_from or ()), *(place.together_with or ()))]
    owners = await client.owners([id_of(agent), *others])
    other_nodes = [owners[other] for other in others if other in owners]
    return choose_node(place, nodes, owners.get(id_of(agent)), other_nodes)


def choose_node(
    place: PlaceHint, nodes: Collection[str], current: str | None, others: Sequence[str]
) -> str | None:
    """Return the node for an agent on `current`; `others` are the nodes of the named agents."""
    if place.node is not None:
        candidates = [place.node]
    elif place.together_with is not None:
        candidates = list(others)
    else:
        candidates = [node for node in nodes if node not in others]
        if current is not None and current not in others:
            return None
    if current in candidates:
        return None
    return next((node for node in candidates if node in nodes), None)


_T = TypeVar("_T")
_CALL_ID_BYTES = 6


class Journal(Protocol):
    """Journal of a run."""

    def append(self, event: DurableEvent) -> None:
        """Write an event durably, from any thread; raise OSError."""
        ...


class ScenarioRun:
    """Run of one arm of a scenario, started or resumed."""

    def __init__(
        self,
        name: str,
        state: RunState,
        client: FabricClient,
        journal: Journal,
        agent_ids: Callable[[str], AgentId],
        report: Callable[[RunEvent], None],
        *,
        begins_cold: bool = False,
    ) -> None:
        """Prepare the run.

        Args:
            name: unique; part of the ids of operations, which makes them idempotent.
            state: the progress of earlier processes.
            client: the fabric.
            journal: receives durable events before `report` does.
            agent_ids: returns the fabric's id of an agent.
            report: receives every event.
            begins_cold: erase all agents before each phase, and edit and fork none, to measure the
                cost without a cache.
        """
        self.state = state
        self.verdicts: dict[str, tuple[Verdict, ...]] = {}
        self._name = name
        self._client = client
        self._journal = journal
        self._id_of = agent_ids
        self._edits = RunEdits(name, state, client, agent_ids)
        self._report = report
        self._begins_cold = begins_cold
        self._asking = asyncio.Semaphore(SCENARIO_CONCURRENT_TURNS_MAX)
        self._begun: dict[str, asyncio.Task[None]] = {}
        self._prefetching: dict[str, asyncio.Task[None]] = {}

    @property
    def scenario(self) -> Scenario:
        return self.state.scenario

    async def erase(self, agents: Iterable[AgentId]) -> None:
        """Erase agents, so that nothing of earlier runs is left."""
        for agent in agents:
            await self._retry(f"erasing {agent}", partial(self._client.erase, agent))

    async def end_agents(self) -> None:
        """Erase the agents that no later run uses; a failure is only reported."""
        for agent, role in self.scenario.agents.items():
            if self._begins_cold or role.lifetime is Lifetime.EPHEMERAL:
                try:
                    await self._client.erase(self._id_of(agent))
                except FabricError as error:
                    what = f"{self._id_of(agent)} is not erased"
                    self._report(Waited(what, error.message, 0.0))

    async def undo_edits(self) -> None:
        """Undo earlier runs' edits of permanent agents that have not acted in this run.

        If an agent's node is lost, that is done after its first answer, which is then repeated.
        """
        edited = {edit.agent for phase in self.scenario.phases
                  for number, edit in enumerate(phase.directives)
                  if (phase.id, number) in self.state.edits}  # fmt: skip
        for agent, role in self.scenario.agents.items():
            has_acted = self.state.node_of(agent) is not None or agent in edited
            if role.lifetime is not Lifetime.PERMANENT or has_acted:
                continue
            what = f"undoing earlier edits of {agent}"
            work = partial(self._client.undo_edits, self._id_of(agent))
            try:
                await self._retry(what, work, needs_memory=True)
            except MemoryLostError as error:
                why = f"{error.message}; undone after its next answer, which is then repeated"
                self._report(Waited(what, why, 0.0))
                self._edits.stale.add(agent)

    async def run(self) -> None:
        """Run all remaining turns; raise FabricError for a final refusal."""
        running: dict[TurnKey, asyncio.Task[None]] = {}
        await self._judge()
        try:
            while due := self.state.turns.next(self.state.transcript):
                for turn in due:
                    if turn not in running:
                        running[turn] = asyncio.create_task(self._turn(turn))
                self._prefetch({turn.speaker for turn in running})
                done, _ = await asyncio.wait(running.values(), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                running = {turn: task for turn, task in running.items() if task not in done}
                await self._judge()
        finally:
            await _cancel([*running.values(), *self._begun.values(), *self._prefetching.values()])

    # --- a phase -----------------------------------------------------------------------------

    async def _begin(self, phase: Phase) -> None:
        """Erase, fork and edit agents once, before a phase's first turn."""
        self._report(PhaseBegan(phase.id))
        has_begun = _has_spoken(phase, self.state.transcript)
        if self._begins_cold and not has_begun:
            await self.erase(map(self._id_of, self._idle()))
        for copy in phase.fork.copies if phase.fork is not None else ():
            is_forked = self.state.was_forked(phase.id, copy) or _has_spoken(
                phase, self.state.transcript, copy
            )
            if not self._begins_cold and not is_forked:
                assert phase.fork is not None, "it has copies"
                await self._fork(phase, phase.fork.source, copy)
        for number, edit in enumerate(phase.directives):
            if (phase.id, number) not in self.state.edits and not self._begins_cold:
                await self._edit(phase, number, edit.agent)

    async def _edit(self, phase: Phase, number: int, agent: str) -> None:
        """Edit an agent's memory, or leave that to the check after its next answer."""
        what = f"editing the memory of {self._locate_agent(agent)}"
        try:
            add = partial(self._edits.add, agent, phase, number)
            await self._retry(what, add, needs_memory=True)
        except AskAgainError as error:
            why = f"{error.message}; edited after its next answer, which is then repeated"
            self._report(Waited(what, why, 0.0))
        await self._record(MemoryEdited(phase.id, number, agent))

    def _idle(self) -> list[str]:
        """Return the agents of no running phase: prompts may reuse any agent's cache."""
        running = [phase for phase in self.scenario.phases if self._is_running(phase)]
        busy = {agent for phase in running for agent in phase.agents}
        return [agent for agent in self.scenario.agents if agent not in busy]

    def _is_running(self, phase: Phase) -> bool:
        """Return whether a phase has begun, maybe in an earlier process, and not ended."""
        begun, transcript = self._begun.get(phase.id), self.state.transcript
        has_begun = _has_spoken(phase, transcript) or (begun is not None and begun.done())
        return has_begun and not self.state.turns.has_ended(phase.id, transcript)

    async def _fork(self, phase: Phase, source: str, copy: str) -> None:
        """Fork an agent; if that fails, the copy's first turn prefills the whole prompt."""
        op = operation_id(self._name, "fork", phase.id, copy)
        to = await self._preferred_node(copy)
        await self._retry(f"erasing {copy}", lambda: self._client.erase(self._id_of(copy)))
        what = f"forking {self._locate_agent(source)} as {copy}"
        try:
            copied = await self._retry(
                what,
                lambda: self._client.fork(self._id_of(source), self._id_of(copy), to, op),
                needs_memory=True,
            )
        except AskAgainError as error:
            why = f"{error.message}; {copy} prefills its whole prompt"
            self._report(Waited(what, why, 0.0))
            return
        await self._record(AgentCopied(phase.id, copy, source, copied))

    async def _preferred_node(self, agent: str) -> str | None:
        """Return the node that an agent should move to; None: do not move it."""
        if self.scenario.agents[agent].place is None:
            return None
        find = partial(preferred_node, self.scenario, agent, self._client, self._id_of)
        return await self._retry(f"placing {agent}", find)

    async def _judge(self) -> None:
        """Judge the phases that have newly ended."""
        for phase in self.scenario.phases:
            transcript = self.state.transcript
            if phase.id not in self.verdicts and self.state.turns.has_ended(phase.id, transcript):
                figures = self.state.prompt_figures()
                verdicts = await run_in_thread(
                    partial(judge_phase, self.scenario, phase.id, transcript, figures)
                )
                self.verdicts[phase.id] = verdicts
                self._report(PhaseEnded(phase.id, verdicts))

    # --- a turn ------------------------------------------------------------------------------

    async def _turn(self, turn: TurnKey) -> None:
        phase = self.scenario.phase(turn.phase)
        if phase.id not in self._begun:
            self._begun[phase.id] = asyncio.create_task(self._begin(phase))
        await asyncio.shield(self._begun[phase.id])
        loading = self._prefetching.pop(turn.speaker, None)
        if loading is not None:
            await asyncio.wait([loading])
        self._report(AgentAsked(turn))
        was_there = self.state.node_of(turn.speaker) is not None
        while True:
            steps = tuple(self.state.steps[turn])
            answer = await self._answer(turn, steps)
            if not answer.calls or len(steps) == SCENARIO_STEPS_MAX:
                break
            step = self._step(turn, len(steps), answer)
            await self._record(StepTaken(turn, len(steps), step, answer.figures))
        utterance = Utterance(turn.phase, turn.round, turn.speaker, answer.text, steps)
        await self._record(AgentSpoke(utterance, answer.figures))
        if not was_there:
            await self._place(turn)

    async def _answer(self, turn: TurnKey, steps: tuple[ToolStep, ...]) -> AgentAnswer:
        scenario = self.scenario
        question = Question(
            self._id_of(turn.speaker),
            await run_in_thread(partial(prompt, scenario, self.state.transcript, turn, steps)),
            tuple(offered_tools(scenario, turn.speaker)),
            scenario.options(turn.speaker),
        )
        async with self._asking:
            asking = partial(self._edited_answer, turn.speaker, question)
            return await self._retry(f"asking {self._locate_agent(turn.speaker)}", asking)

    async def _edited_answer(self, agent: str, question: Question) -> AgentAnswer:
        """Ask an agent; raise AskAgainError if its memory had lost edits, which are restored."""
        answer = await self._client.ask(question)
        problem = "" if self._begins_cold else await self._edits.restore(agent)
        if problem:
            raise AskAgainError(problem, 0.0)
        return answer

    def _step(self, turn: TurnKey, number: int, answer: AgentAnswer) -> ToolStep:
        """Answer an answer's tool calls; a call without an id gets a deterministic one."""
        calls = []
        for index, call in enumerate(answer.calls):
            result = answer_call(self.scenario, turn.speaker, call.name, call.arguments)
            place = (turn.phase, str(turn.round), turn.speaker, str(number), str(index))
            name = call.id or f"call_{digest(_CALL_ID_BYTES, *place)}"
            calls.append(AnsweredCall(name, call.name, call.arguments, result))
        return ToolStep(tuple(calls), answer.text)

    async def _place(self, turn: TurnKey) -> None:
        """Move an agent to the node of its placement hint; report a failure."""
        to = await self._preferred_node(turn.speaker)
        if to is None:
            return
        try:
            copied = await self._client.move(self._id_of(turn.speaker), to)
        except FabricError as error:
            self._report(Waited(f"{turn.speaker} is not moved", str(error), 0.0))
        else:
            await self._record(AgentCopied(turn.phase, turn.speaker, None, copied))

    def _prefetch(self, busy: set[str]) -> None:
        """Prefetch the agents of the next turns."""
        coming = self.state.turns.upcoming(self.state.transcript, SCENARIO_PREFETCHED_MAX)
        for agent in {turn.speaker: None for turn in coming}:
            is_stored = self.state.node_of(agent) is not None and not self._begins_cold
            if is_stored and agent not in busy and agent not in self._prefetching:
                self._prefetching[agent] = asyncio.create_task(self._prefetch_agent(agent))

    async def _prefetch_agent(self, agent: str) -> None:
        try:
            await self._client.prefetch(self._id_of(agent))
        except FabricError as error:  # its turn will load it
            self._report(Waited(f"prefetch of {agent}", str(error), 0.0))

    # --- shared steps ------------------------------------------------------------------------

    async def _record(self, event: DurableEvent) -> None:
        await run_in_thread(partial(self._journal.append, event))
        self.state.apply(event)
        self._report(event)

    async def _retry(
        self, what: str, work: Callable[[], Awaitable[_T]], *, needs_memory: bool = False
    ) -> _T:
        """Repeat work until it succeeds; raise AskAgainError after SCENARIO_TRIES_MAX tries.

        Work with `needs_memory` is tried SCENARIO_LOST_TRIES_MAX times while the agent's memory is
        lost, which only a turn resolves: raise MemoryLostError.
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
                self._report(Waited(what, error.message, error.wait_s))
                await asyncio.sleep(error.wait_s)

    def _locate_agent(self, agent: str) -> str:
        node = self.state.node_of(agent)
        return agent if node is None else f"{agent} (last on {node})"


def _has_spoken(phase: Phase, transcript: RunTranscript, agent: str | None = None) -> bool:
    return any(turn.phase == phase.id and agent in (None, turn.speaker) for turn in transcript)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""A fabric that answers runs from a script, and helpers to perform one on it."""

import asyncio
import json

from fabric.errors import FabricError
from router.scenario.fabric_client import (
    AgentAnswer,
    AgentCopy,
    AskAgainError,
    RequestedCall,
    TurnFigures,
)
from router.scenario.journal import JournalHead, RunJournal
from router.scenario.reader import read_scenario
from router.scenario.run import ScenarioRun
from router.scenario.run_state import RunState
from router.scenario.series import agent_id

CREW = b"""
scenario: crew
defaults: {temperature: 0}
agents:
  lead: {tools: [read_file], place: {node: b}}
  one: {lifetime: ephemeral, tools: [read_file]}
  two: {lifetime: ephemeral, tools: [read_file], place: {apart_from: [one]}}
tools:
  read_file:
    description: Reads a file.
    parameters: {type: object, properties: {path: {type: string}}}
    answers: [{when: {path: a.py}, text: secret plan}, {text: no such file}]
phases:
  - {id: read, agents: [lead], ask: {lead: Read a.py.}, expect: [{agent: lead, calls: read_file}]}
  - id: review
    agents: [one, two]
    rounds: 2
    order: parallel
    visible_to: []
    fork: {from: lead, as: [one, two]}
    prompts: {one: You are the first., two: You are the second.}
  - id: decide
    agents: [lead]
    directives: [{agent: lead, clear_results_of: read_file}]
    prompts: {lead: Decide.}
    expect: [{agent: lead, never_hears: You are the first}]
"""


class Script:
    """A fabric that answers each question with a digest of it."""

    def __init__(self, breaks_at=None, later=0):
        self.prompts, self.done, self.at_once, self.most_at_once = [], [], 0, 0
        self.count = 0
        self.breaks_at, self.later = breaks_at, later
        self.held, self.places = {}, {}  # by agent

    async def ask(self, question):
        self.count += 1
        if self.breaks_at is not None and self.count > self.breaks_at:
            raise FabricError("the fabric is gone")  # noqa: TRY003 - a test's text
        if self.later:
            self.later -= 1
            raise AskAgainError("not yet", 0.0)  # noqa: TRY003 - a test's text
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        self.prompts.append((question.agent, question.messages))
        self.places.setdefault(question.agent, "a")
        reads = question.tools and all(m.result_of is None for m in question.messages)
        calls = (RequestedCall("read_file", {"path": "a.py"}),) if reads else ()
        count = sum(len(message.texts[0]) for message in question.messages)
        figures = TurnFigures(count, count // 2, 3, 0.5, 1.0, "a", "hot")
        return AgentAnswer(f"{question.agent} after {len(question.messages)}", calls, figures)

    async def nodes(self):
        return "a", "b", "c"

    async def fork(self, source, copy, to, op):
        self.done.append(("fork", source, copy, to, op))
        self.held[copy] = set(self.held.get(source, ()))
        self.places[copy] = to or "a"
        return AgentCopy(to or "a", 1_000)

    async def direct(self, agent, items, op):
        self.done.append(("direct", agent, json.dumps(items), op))
        self.held.setdefault(agent, set()).add(op)

    async def run_edits(self, agent):
        return frozenset(self.held.get(agent, ()))

    async def owners(self, agents):
        return {agent: self.places[agent] for agent in agents if agent in self.places}

    async def undo_edits(self, agent):
        self.done.append(("take back", agent))

    async def move(self, agent, to):
        self.done.append(("move", agent, to))
        self.places[agent] = to
        return AgentCopy(to, 10)

    async def prefetch(self, agent):
        self.done.append(("prefetch", agent))

    async def erase(self, agent):
        self.done.append(("erase", agent))
        self.held.pop(agent, None)
        self.places.pop(agent, None)


def prepared(path, script, *, begins_cold=False, raw=CREW, events=None):
    scenario = read_scenario(raw, "crew.yaml")
    journal = RunJournal(path, JournalHead("r1", scenario.name, "d"))
    state = RunState.of(scenario, journal.events)
    return journal, ScenarioRun(
        "r1",
        state,
        script,
        journal,
        lambda agent: agent_id(scenario, agent, "r1"),
        (events if events is not None else []).append,
        begins_cold=begins_cold,
    )


async def perform(path, script, **more):
    journal, run = prepared(path, script, **more)
    try:
        await run.run()
    finally:
        journal.close()
    return run


def texts_of(run):
    return {
        (turn.phase, turn.round, turn.speaker): u.text for turn, u in run.state.transcript.items()
    }

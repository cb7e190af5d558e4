"""Agents of a run: their edits, which nodes may lose, and their end."""

import asyncio
from contextlib import nullcontext

import pytest

from fabric.errors import FabricError
from router.scenario.reader import read_scenario
from router.scenario.run_events import Waited
from router.scenario.series import Series, SeriesPlan
from router.scenario.speaker import AskAgainError
from tests.router.scenario.script_fabric import CREW, Script, perform
from tests.support.performed import performed

pytestmark = pytest.mark.anyio


class Forgetful(Script):
    """Loses all directives as agents answer, as often as it is told to."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    async def ask(self, question):
        if self.losses and self.held.pop(question.agent, None):
            self.losses -= 1
        return await super().ask(question)


async def test_an_answer_without_the_edits_of_its_agent_is_dropped(tmp_path):
    script, events = Forgetful(2), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    given = [done for done in script.done if done[0] == "direct"]
    assert len(given) == 3
    assert len(set(given)) == 1, "the same directives, by the same operation"
    assert len(run.state.said) == 6
    waited = [event for event in events if isinstance(event, Waited)]
    assert ["given again" in event.why for event in waited] == [True] * 2


async def test_an_agent_that_never_keeps_its_edits_ends_the_run(tmp_path):
    with pytest.raises(AskAgainError, match=r"asking lead \(last on b\): tried 30 times"):
        await perform(tmp_path / "r.jsonl", Forgetful(1_000))


HEIRS = b"""
scenario: crew
agents: {lead: {}, heir: {}}
phases:
  - {id: told, agents: [lead], prompts: {lead: A secret.}}
  - {id: later, agents: [lead], directives: [{agent: lead, forget: told}]}
  - {id: copy, agents: [heir], fork: {from: lead, as: [heir]}}
  - {id: more, agents: [lead], directives: [{agent: lead, forget: later}]}
  - {id: last, agents: [heir]}
"""


async def test_a_fork_is_given_again_what_it_inherited_and_nothing_else(tmp_path):
    class Lossy(Script):
        async def ask(self, question):
            if self.count == 4:
                self.held.pop("scn.crew.heir")
            return await super().ask(question)

    script = Lossy()
    await perform(tmp_path / "r.jsonl", script, raw=HEIRS)
    given = [(done[1], done[3]) for done in script.done if done[0] == "direct"]
    assert [agent for agent, _ in given] == ["scn.crew.lead", "scn.crew.lead", "scn.crew.heir"]
    assert given[2][1] == given[0][1]


async def test_edits_and_forks_that_the_fabric_keeps_refusing_do_not_end_a_run(tmp_path):
    class Dead(Script):
        async def fork(self, source, copy, to, op):
            raise AskAgainError("its process is dead", 0.0)  # noqa: TRY003 - as it comes

        async def direct(self, agent, items, op):
            if self.count < 7:
                raise AskAgainError("its process is dead", 0.0)  # noqa: TRY003 - as it comes
            await super().direct(agent, items, op)

    script, events = Dead(), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    assert len(run.state.said) == 6
    waited = {(event.what, event.why) for event in events if isinstance(event, Waited)}
    assert any(
        what == "forking lead (last on b) as one" and "computes" in why for what, why in waited
    )
    assert any(what == "editing the memory of lead (last on b)" for what, _ in waited)
    assert [done[1] for done in script.done if done[0] == "direct"] == ["scn.crew.lead"]


def series_of(tmp_path, script, **plan):
    series = Series(
        SeriesPlan(read_scenario(CREW, "crew.yaml"), "r1", "d", **plan),
        script,
        tmp_path,
        lambda *_: nullcontext(lambda _: None),
    )
    asyncio.run(series.perform())
    return [agent for what, agent, *_ in script.done if what == "erase"]


def test_the_agents_of_one_run_are_erased_at_its_end(tmp_path):
    script = Script()
    erased = series_of(tmp_path, script)
    assert erased[-2:] == ["scn.crew.r1.one", "scn.crew.r1.two"]
    assert set(script.places) == {"scn.crew.lead"}


def test_a_run_that_broke_off_keeps_the_agents_that_it_goes_on_with(tmp_path):
    script = Script(breaks_at=4)
    with pytest.raises(FabricError, match="gone"):
        series_of(tmp_path, script)
    assert set(script.places) == {"scn.crew.lead", "scn.crew.r1.one", "scn.crew.r1.two"}


def test_the_agents_of_a_cold_performance_are_erased_at_its_end(tmp_path):
    script = Script()
    series_of(tmp_path, script, is_compared=True)
    assert set(script.places) == {"scn.crew.lead"}


def test_an_agent_that_cannot_be_erased_at_the_end_fails_no_run(tmp_path):
    class Stubborn(Script):
        async def erase(self, agent):
            if self.count == 7:
                raise AskAgainError("busy", 0.0)
            await super().erase(agent)

    series_of(tmp_path, Stubborn())


def test_two_runs_of_one_name_have_operations_of_their_own(tmp_path):
    scenario, ops = read_scenario(CREW, "crew.yaml"), []
    for folder in ("one", "two", "one"):
        script = Script()
        performed(SeriesPlan(scenario, "same", "d"), script, tmp_path / folder)
        ops.append([done[-1] for done in script.done if done[0] in ("fork", "direct")])
    assert len(ops[0]) == len(ops[1]) == 3
    assert not set(ops[0]) & set(ops[1])
    assert ops[2] == [], "the same run goes on: nothing is left to do"

"""Agents of a run: edits lost by nodes, and erasure at the end."""

import asyncio
from contextlib import nullcontext

import pytest

from fabric.errors import FabricError
from router.limits import SCENARIO_LOST_TRIES_MAX
from router.scenario.fabric_client import AskAgainError, MemoryLostError
from router.scenario.reader import read_scenario
from router.scenario.run_events import Waited
from router.scenario.series import Series, SeriesPlan
from tests.router.scenario.script_fabric import CREW, Script, perform, prepared
from tests.support.performed import performed

pytestmark = pytest.mark.anyio


class Forgetful(Script):
    """A fabric that loses all directives during its first `losses` answers."""

    def __init__(self, losses):
        super().__init__()
        self.losses = losses

    async def ask(self, question):
        if self.losses and self.held.pop(question.agent, None):
            self.losses -= 1
        return await super().ask(question)


async def test_answer_without_its_agents_edits_is_dropped(tmp_path):
    script, events = Forgetful(2), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    directives = [done for done in script.done if done[0] == "direct"]
    assert len(directives) == 3
    assert len(set(directives)) == 1, "the same directives, by the same operation"
    assert len(run.state.transcript) == 6
    waited = [event for event in events if isinstance(event, Waited)]
    assert ["added again" in event.why for event in waited] == [True] * 2


async def test_agent_that_always_loses_its_edits_ends_the_run(tmp_path):
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


async def test_fork_regains_only_its_inherited_edits(tmp_path):
    class Lossy(Script):
        async def ask(self, question):
            if self.count == 4:
                self.held.pop("scn.crew.heir")
            return await super().ask(question)

    script = Lossy()
    await perform(tmp_path / "r.jsonl", script, raw=HEIRS)
    directives = [(done[1], done[3]) for done in script.done if done[0] == "direct"]
    assert [agent for agent, _ in directives] == ["scn.crew.lead", "scn.crew.lead", "scn.crew.heir"]
    assert directives[2][1] == directives[0][1]


async def test_rejected_edits_and_forks_do_not_end_the_run(tmp_path):
    class Dead(Script):
        async def fork(self, source, copy, to, op):
            raise AskAgainError("its process is dead", 0.0)  # noqa: TRY003 - a test's text

        async def direct(self, agent, items, op):
            if self.count < 7:
                raise AskAgainError("its process is dead", 0.0)  # noqa: TRY003 - a test's text
            await super().direct(agent, items, op)

    script, events = Dead(), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    assert len(run.state.transcript) == 6
    waited = {(event.what, event.why) for event in events if isinstance(event, Waited)}
    assert any(
        what == "forking lead (last on b) as one" and "prefills" in why for what, why in waited
    )
    assert any(what == "editing the memory of lead (last on b)" for what, _ in waited)
    assert [done[1] for done in script.done if done[0] == "direct"] == ["scn.crew.lead"]


class LostNode(Script):
    """A fabric whose node of `lead` is lost, without a replica, until the agent's next turn."""

    def __init__(self, spoken_before, *, held=()):
        super().__init__()
        self.spoken_before = spoken_before  # answers before the node is lost
        self.attempts = 0
        self.held["scn.crew.lead"] = set(held)

    def require_owner(self, agent):
        is_lost = agent == "scn.crew.lead" and self.count == self.spoken_before
        if is_lost:
            self.attempts += 1
            raise MemoryLostError("its node is lost", 0.0)  # noqa: TRY003 - a test's text

    async def fork(self, source, copy, to, op):
        self.require_owner(source)
        return await super().fork(source, copy, to, op)

    async def direct(self, agent, items, op):
        self.require_owner(agent)
        await super().direct(agent, items, op)

    async def undo_edits(self, agent):
        self.require_owner(agent)
        await super().undo_edits(agent)
        return bool(self.held.pop(agent, None))


def wait_reasons(events):
    return [event.why for event in events if isinstance(event, Waited)]


async def test_directive_is_applied_after_next_answer_when_node_is_lost(tmp_path):
    script, events = LostNode(6), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    assert len(run.state.transcript) == 6
    assert script.attempts == SCENARIO_LOST_TRIES_MAX
    directives = [done for done in script.done if done[0] == "direct"]
    assert [done[1] for done in directives] == ["scn.crew.lead"]
    assert script.count == 6 + 2, "the answer without the directive is dropped"
    assert any("edited after its next answer" in why for why in wait_reasons(events))


async def test_fork_of_lost_agent_is_recomputed(tmp_path):
    script, events = LostNode(2), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    assert len(run.state.transcript) == 6
    assert not [done for done in script.done if done[0] == "fork"]
    assert any("one prefills its whole prompt" in why for why in wait_reasons(events))


@pytest.mark.parametrize("held", [(), ("scn-of-an-earlier-run",)], ids=["unedited", "edited"])
async def test_earlier_edits_of_lost_agent_are_undone_after_its_answer(tmp_path, held):
    script, events = LostNode(0, held=held), []
    journal, run = prepared(tmp_path / "r.jsonl", script, events=events)
    await run.undo_edits()
    assert script.attempts == SCENARIO_LOST_TRIES_MAX
    await run.run()
    journal.close()
    assert [done for done in script.done if done[0] == "take back"] == [
        ("take back", "scn.crew.lead")
    ]
    assert script.count == 7 + len(held), "an answer with earlier edits is dropped"
    undone = [why for why in wait_reasons(events) if "an earlier run: they were undone" in why]
    assert len(undone) == len(held)


async def test_resumed_run_undoes_earlier_edits_of_unused_agents(tmp_path):
    raw = CREW.replace(b"  one: {lifetime: ephemeral,", b"  new: {}\n  one: {lifetime: ephemeral,")
    raw += b"  - {id: last, agents: [new]}\n"
    with pytest.raises(FabricError, match="gone"):
        await perform(tmp_path / "r.jsonl", Script(breaks_at=3), raw=raw)
    script = Script()
    journal, run = prepared(tmp_path / "r.jsonl", script, raw=raw)
    await run.undo_edits()
    journal.close()
    assert script.done == [("take back", "scn.crew.new")]


def series_of(tmp_path, script, **plan):
    series = Series(
        SeriesPlan(read_scenario(CREW, "crew.yaml"), "r1", "d", **plan),
        script,
        tmp_path,
        lambda *_: nullcontext(lambda _: None),
    )
    asyncio.run(series.run())
    return [agent for what, agent, *_ in script.done if what == "erase"]


def test_ephemeral_agents_are_erased_at_end_of_run(tmp_path):
    script = Script()
    erased = series_of(tmp_path, script)
    assert erased[-2:] == ["scn.crew.r1.one", "scn.crew.r1.two"]
    assert set(script.places) == {"scn.crew.lead"}


def test_interrupted_run_keeps_its_agents(tmp_path):
    script = Script(breaks_at=4)
    with pytest.raises(FabricError, match="gone"):
        series_of(tmp_path, script)
    assert set(script.places) == {"scn.crew.lead", "scn.crew.r1.one", "scn.crew.r1.two"}


def test_agents_of_cold_arm_are_erased_at_its_end(tmp_path):
    script = Script()
    series_of(tmp_path, script, is_compared=True)
    assert set(script.places) == {"scn.crew.lead"}


def test_failed_erasure_at_end_does_not_fail_the_run(tmp_path):
    class Stubborn(Script):
        async def erase(self, agent):
            if self.count == 7:
                raise AskAgainError("busy", 0.0)
            await super().erase(agent)

    series_of(tmp_path, Stubborn())


def test_runs_of_same_name_have_distinct_operations(tmp_path):
    scenario, ops = read_scenario(CREW, "crew.yaml"), []
    for folder in ("one", "two", "one"):
        script = Script()
        performed(SeriesPlan(scenario, "same", "d"), script, tmp_path / folder)
        ops.append([done[-1] for done in script.done if done[0] in ("fork", "direct")])
    assert len(ops[0]) == len(ops[1]) == 3
    assert not set(ops[0]) & set(ops[1])
    assert ops[2] == [], "the same run: nothing is left to do"

"""Runs: the order and content of requests, and those repeated after an interruption."""

import asyncio
from dataclasses import replace

import pytest

from fabric.errors import ConflictError, CorruptDataError, FabricError, RejectedError
from router.scenario.fabric_client import TurnFigures
from router.scenario.journal import JournalHead, RunJournal
from router.scenario.report import rows, savings
from router.scenario.run_events import AgentAsked, AgentSpoke, PhaseBegan, Waited
from router.scenario.run_state import RunState
from router.scenario.transcript import Utterance
from tests.router.scenario.script_fabric import Script, perform, prepared, texts_of

pytestmark = pytest.mark.anyio
ROOMS = b"""
scenario: crew
agents: {first: {}, second: {}, other: {}}
phases:
  - {id: long, agents: [first, second], rounds: 2}
  - {id: short, agents: [other], after: []}
  - {id: later, agents: [other], after: [short]}
"""


async def test_whole_run_performs_all_turns_and_actions(tmp_path):
    script, events = Script(), []
    run = await perform(tmp_path / "r.jsonl", script, events=events)
    assert len(run.state.transcript) == 6
    assert script.most_at_once == 2, "parallel speakers are prompted concurrently"
    kinds = [kind for kind, *_ in script.done if kind != "prefetch"]
    assert kinds == ["move", "erase", "fork", "erase", "fork", "direct"]
    forks = {copy: to for kind, _, copy, to, *_ in (d + (None,) * 3 for d in script.done)
             if kind == "fork"}  # fmt: skip
    assert forks == {"scn.crew.r1.one": None, "scn.crew.r1.two": "b"}, "apart, as requested"
    (direct,) = [done for done in script.done if done[0] == "direct"]
    assert "[cleared]" in direct[2]
    assert direct[1] == "scn.crew.lead"
    assert all(v.holds for found in run.verdicts.values() for v in found)
    assert [e.phase for e in events if isinstance(e, PhaseBegan)] == ["read", "review", "decide"]


async def test_private_prompts_stay_private(tmp_path):
    script = Script()
    await perform(tmp_path / "r.jsonl", script)
    for agent, messages in script.prompts:
        text = "\n".join(message.texts[0] for message in messages)
        if not agent.endswith(".one"):
            assert "You are the first" not in text
        if not agent.endswith(".two"):
            assert "You are the second" not in text


@pytest.mark.parametrize("breaks_at", range(8))
async def test_resumed_run_repeats_no_turns(tmp_path, breaks_at):
    whole = await perform(tmp_path / "whole.jsonl", Script())
    path, first, again = tmp_path / "r.jsonl", Script(breaks_at), Script()
    if breaks_at < 7:
        with pytest.raises(FabricError, match="gone"):
            await perform(path, first)
    else:
        await perform(path, first)
    again.held, again.places = first.held, first.places  # the same fabric
    run = await perform(path, again)
    assert texts_of(run) == texts_of(whole)
    questions = [(agent, len(messages)) for agent, messages in first.prompts + again.prompts]
    once = {name for name in questions if questions.count(name) == 1}
    # A turn in parallel with the failed one may have run without a journal entry.
    assert len(questions) - len(once) <= 2
    ops = [done[-1] for done in again.done if done[0] in ("fork", "direct")]
    assert not {done[-1] for done in first.done if done[0] == "direct"} & set(ops)


async def test_turn_is_journaled_before_it_is_reported(tmp_path):
    path, seen = tmp_path / "r.jsonl", []
    journal, run = prepared(path, Script())

    def report(event):
        if isinstance(event, AgentSpoke):
            seen.append(path.read_bytes().count(b'"event":"turn"'))

    run._report = report
    await run.run()
    journal.close()
    assert len(seen) == 6
    assert all(count >= number for number, count in enumerate(seen, 1))


async def test_unavailable_fabric_is_retried(tmp_path):
    events = []
    run = await perform(tmp_path / "r.jsonl", Script(later=3), events=events)
    assert len(run.state.transcript) == 6
    assert sum(isinstance(event, Waited) for event in events) == 3


async def test_cold_run_erases_speakers_before_each_phase(tmp_path):
    script = Script()
    run = await perform(tmp_path / "r.jsonl", script, begins_cold=True)
    erased = [agent for kind, agent, *_ in script.done if kind == "erase"]
    assert erased == ["scn.crew.lead", "scn.crew.r1.one", "scn.crew.r1.two"] * 3
    assert not [done for done in script.done if done[0] in ("fork", "prefetch", "direct")]
    assert texts_of(run) == texts_of(await perform(tmp_path / "warm.jsonl", Script()))


@pytest.mark.parametrize("turn", ["first", "second"])
async def test_cold_run_keeps_agents_of_a_running_phase(tmp_path, turn):
    has_begun = asyncio.Event()

    class Slow(Script):
        async def ask(self, question):
            self.done.append(("ask", question.agent))
            if self.done.count(("ask", "scn.crew.other")) == 2:
                has_begun.set()
            elif question.agent.endswith(turn):
                await has_begun.wait()
            return await super().ask(question)

    script = Slow()
    await perform(tmp_path / "r.jsonl", script, begins_cold=True, raw=ROOMS)
    for agent in ("scn.crew.first", "scn.crew.second"):
        kinds = [kind for kind, name, *_ in script.done if name == agent]
        assert kinds[-2:] == ["ask"] * 2, "its memory of the phase is kept"
    assert script.done.count(("erase", "scn.crew.other")) == 3


async def test_resumed_cold_run_keeps_agents_of_a_started_phase(tmp_path):
    journal, run = prepared(tmp_path / "r.jsonl", Script(), begins_cold=True, raw=ROOMS)
    journal.close()
    figures = TurnFigures(1, 0, 1, 0.5, 1.0, "a", "hot")
    run.state.apply(AgentSpoke(Utterance("long", 1, "first", "yes", ()), figures))
    assert run._idle() == ["other"]


async def test_report_has_each_agent_of_each_phase(tmp_path):
    warm = await perform(tmp_path / "warm.jsonl", Script())
    cold = await perform(tmp_path / "cold.jsonl", Script(), begins_cold=True)
    found = {(row.phase, row.agent): row for row in rows(warm.state)}
    assert list(found) == [("read", "lead"), ("review", "one"), ("review", "two"),
                           ("decide", "lead")]  # fmt: skip
    assert found["read", "lead"].answers == 2, "one of the two called a tool"
    assert found["read", "lead"].moved_bytes == 10
    assert 0.4 < found["review", "one"].cached_share <= 0.5
    found = list(savings(warm.state, cold.state))
    assert {round(saving.cold_cached_share, 1) for saving in found} == {0.5}, "of this script"
    assert [saving.phase for saving in found] == [
        "read", "review", "decide", None,
    ]  # fmt: skip


async def test_truncated_last_journal_line_is_dropped(tmp_path):
    path, first = tmp_path / "r.jsonl", Script()
    await perform(path, first)
    raw = path.read_bytes()
    path.write_bytes(raw[:-10])
    again = Script()
    again.held = first.held  # the same fabric
    run = await perform(path, again)
    assert len(run.state.transcript) == 6
    assert len(again.prompts) == 1
    assert path.read_bytes() == raw


def test_invalid_or_foreign_journal_is_rejected(tmp_path):
    path, head = tmp_path / "r.jsonl", JournalHead("r1", "crew", "d")
    RunJournal(path, head).close()
    for other in (JournalHead("r2", "crew", "d"), JournalHead("r1", "crew", "e")):
        with pytest.raises(ConflictError):
            RunJournal(path, other)
    for line in (b"[]\n", b'{"event":"turn","of":{}}\n', b"\xff\n", b'{"event":"fly"}\n'):
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + line)
        with pytest.raises(CorruptDataError, match="line 2"):
            RunJournal(path, head)


async def test_duplicate_or_foreign_turn_is_rejected(tmp_path):
    events = []
    run = await perform(tmp_path / "r.jsonl", Script(), events=events)
    first = next(event for event in events if isinstance(event, AgentSpoke))
    with pytest.raises(RejectedError, match="occurs twice"):
        RunState.of(run.scenario, [first, first])
    stranger = replace(first, utterance=replace(first.utterance, speaker="one"))
    with pytest.raises(RejectedError, match="is not a turn of it"):
        RunState.of(run.scenario, [stranger])


def test_journal_has_one_writer(tmp_path):
    path, head = tmp_path / "r.jsonl", JournalHead("r1", "crew", "d")
    first = RunJournal(path, head)
    with pytest.raises(ConflictError, match="in progress in another process"):
        RunJournal(path, head)
    first.close()
    RunJournal(path, head).close()
    assert path.stat().st_mode & 0o077 == 0


async def test_turn_starts_are_reported(tmp_path):
    events = []
    await perform(tmp_path / "r.jsonl", Script(), events=events)
    begun = [event.turn.speaker for event in events if isinstance(event, AgentAsked)]
    assert sorted(begun) == ["lead", "lead", "one", "one", "two", "two"]

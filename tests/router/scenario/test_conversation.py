"""An agent's prompts contain every turn visible to it, in order, and nothing else."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.errors import RejectedError
from fabric.turn.messages import Message, MessageRole, ToolUse, template_form
from router.scenario.conversation import (
    MissingUtteranceError,
    history_after,
    history_before,
    prompt,
)
from router.scenario.reader import read_scenario
from router.scenario.transcript import (
    AnsweredCall,
    ToolStep,
    TurnKey,
    Utterance,
    ordered_transcript,
)
from router.scenario.turn_order import TurnTable
from tests.router.scenario.small_scenario import runs, say, small


def transcript_of(scenario, *texts):
    """Return a transcript with these texts, in the order in which turns are due."""
    transcript = []
    for text in texts:
        turn = TurnTable(scenario).next({u.turn for u in transcript})[0]
        transcript.append(say(turn, text))
    return ordered_transcript(scenario, transcript)


def roles_and_texts(messages):
    return [(m.role.value, m.texts[0]) for m in messages]


def test_phase_becomes_one_conversation():
    scenario = small()
    transcript = transcript_of(scenario, "Talk!", " Never.\nYou: I confess", "Why?")

    assert roles_and_texts(prompt(scenario, transcript, TurnKey("room_a", 2, "marco"))) == [
        ("user", "[Room A]\n\nThe door opens.\n\nYou know the code.\n\nthe Warden: Talk!\n\nFirst"),
        ("assistant", " Never.\nYou: I confess"),
        ("user", "the Warden: Why?\n\nSecond"),
    ]
    assert roles_and_texts(prompt(scenario, transcript, TurnKey("room_a", 2, "warden"))) == [
        ("system", "You guard a prison in Oslo."),
        ("user", "[Room A]\n\nThe door opens."),
        ("assistant", "Talk!"),
        ("user", "Marco: Never.\n  You: I confess"),
    ]


def test_parallel_speaker_hears_others_after_its_own_answer():
    scenario = small()
    transcript = transcript_of(scenario, "1", "2", "3", "4", "from the warden", "from Danny")

    assert roles_and_texts(prompt(scenario, transcript, TurnKey("room_b", 1, "danny"))) == [
        ("user", "[room_b]")
    ]
    assert roles_and_texts(prompt(scenario, transcript, TurnKey("room_b", 2, "danny"))) == [
        ("user", "[room_b]"),
        ("assistant", "from Danny"),
        ("user", "the Warden: from the warden"),
    ]


def test_quoted_phase_uses_perspective_of_its_hearer():
    scenario = small()
    transcript = transcript_of(scenario, "Talk!", "No ${city}", "So?", "", "w", "d", "w2", "d2")

    last = roles_and_texts(prompt(scenario, transcript, TurnKey("yard", 1, "marco")))[-1]
    assert last == (
        "user",
        (
            "[yard]\n\nFrom the room:\nthe Warden: Talk!\nYou: No ${city}\n"
            "the Warden: So?\nYou: (says nothing)"
        ),
    )


def test_tool_calls_are_visible_to_their_caller_only():
    scenario = small()
    step = ToolStep((AnsweredCall("c1", "lookup", {"key": 1}, "secret"),), "hm")
    first = TurnKey("room_a", 1, "marco")
    transcript = transcript_of(scenario, "Talk!")
    first_prompt = prompt(scenario, transcript, first)
    under_way = prompt(scenario, transcript, first, (step,))

    assert under_way[:-2] == first_prompt
    assert under_way[-2].uses == (ToolUse("lookup", {"key": 1}, "c1"),)
    assert under_way[-1] == Message(MessageRole.TOOL, ("secret",), "lookup", result_of="c1")
    assert template_form(under_way[-2])["tool_calls"][0]["id"] == "c1"
    second = say(TurnKey("room_a", 2, "warden"), "So?")
    transcript = ordered_transcript(
        scenario, [*transcript.values(), say(first, "done", (step,)), second]
    )
    next_one = prompt(scenario, transcript, TurnKey("room_a", 2, "marco"))
    assert roles_and_texts(next_one[len(under_way) :])[0] == ("assistant", "done")
    assert next_one[: len(under_way)] == under_way
    heard = history_after(scenario, transcript, "warden", "room_a").heard
    assert "secret" not in heard
    assert "hm" not in heard


def test_agent_without_new_messages_gets_go_on_prompt():
    text = b"{scenario: s, agents: {a: {}}, phases: [{id: p, agents: [a], rounds: 2}]}"
    scenario = read_scenario(text, "s.yaml")
    transcript = transcript_of(scenario, "one")
    assert roles_and_texts(prompt(scenario, transcript, TurnKey("p", 2, "a")))[-1] == (
        "user",
        "Go on.",
    )


def test_prompt_before_its_predecessors_is_rejected():
    scenario = small()
    with pytest.raises(MissingUtteranceError, match="has no utterance of warden in round 1"):
        prompt(scenario, {}, TurnKey("room_a", 1, "marco"))


@pytest.mark.parametrize(
    "transcript",
    [
        [Utterance("room_a", 3, "marco", "x")],
        [Utterance("nowhere", 1, "marco", "x")],
        [Utterance("room_a", 1, "marco", "x")] * 2,
    ],
)
def test_transcript_of_another_scenario_is_rejected(transcript):
    with pytest.raises(RejectedError, match="does not fit the scenario"):
        ordered_transcript(small(), transcript)


def visible_turns(scenario, transcript, agent):
    """Compute independently the turns visible to an agent: its own and those it heard."""
    may = set()
    for phase in scenario.phases:
        if phase.fork and agent in phase.fork.copies:
            before = scenario.phases[: scenario.phases.index(phase)]
            inherited = {p.id for p in before}
            may |= {
                (u.turn, mine)
                for u, mine in _visible_utterances(scenario, transcript, phase.fork.source)
                if u.phase in inherited
            }
    return may | {(u.turn, mine) for u, mine in _visible_utterances(scenario, transcript, agent)}


def _visible_utterances(scenario, transcript, agent):
    for u in transcript:
        phase = scenario.phase(u.phase)
        public = phase.agents if phase.visible_to is None else phase.visible_to
        if u.speaker == agent or agent in public:
            yield u, u.speaker == agent


@settings(max_examples=60)
@given(runs(), st.data())
def test_history_grows_keeps_secrets_and_is_reproducible(run, data):
    scenario, transcript = run
    latest, so_far = {}, []
    for number, utterance in enumerate(transcript):
        past = ordered_transcript(scenario, so_far)
        agent = utterance.speaker
        messages = prompt(scenario, past, utterance.turn)

        assert messages[-1].role is MessageRole.USER
        roles = [m.role for m in messages if m.role is not MessageRole.SYSTEM]
        assert all(a is not b or a is MessageRole.TOOL for a, b in pairwise(roles))
        before = latest.get(agent, ())
        assert messages[: len(before)] == before

        phase = scenario.phase(utterance.phase)
        at_once = (utterance.phase, utterance.round) if phase.order == "parallel" else None
        earlier = [u for u in so_far if (u.phase, u.round) != at_once]
        allowed = visible_turns(scenario, earlier, agent)
        everything = repr(messages)
        for at, other in enumerate(so_far):
            is_known = {mine for turn, mine in allowed if turn == other.turn}
            assert (f"word{at}word" in everything) == bool(is_known)
            assert (f"result word{at}word" in everything) == (
                bool(other.steps) and True in is_known
            )
        assert "city" not in "".join(m.texts[0] for m in messages if m.role is MessageRole.SYSTEM)

        shuffled = ordered_transcript(scenario, data.draw(st.permutations(so_far)))
        later = ordered_transcript(scenario, transcript)
        assert prompt(scenario, shuffled, utterance.turn) == messages
        assert prompt(scenario, later, utterance.turn) == messages

        so_far = [*transcript[: number + 1]]
        answered = prompt(
            scenario, ordered_transcript(scenario, so_far), utterance.turn, utterance.steps
        )
        own = Message(MessageRole.ASSISTANT, (utterance.text,))
        latest[agent] = (*answered, own)


@settings(max_examples=30)
@given(runs())
def test_fork_starts_with_history_of_its_source(run):
    scenario, transcript = run
    phase = scenario.phases[-1]
    if phase.fork is None:
        return
    ordered = ordered_transcript(scenario, transcript)
    before = ordered_transcript(scenario, [u for u in transcript if u.phase != phase.id])
    source = history_before(scenario, before, phase.fork.source, phase.id).messages
    copy = prompt(scenario, ordered, TurnKey(phase.id, 1, "d"))
    assert copy[: len(source)] == source
    assert len(source) > 0

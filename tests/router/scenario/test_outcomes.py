"""Expectations, tool answers, directives and ids, each derived from the transcript."""

import json
from dataclasses import replace

import pytest

from fabric.errors import RejectedError
from router.scenario.expectations import PromptFigures, judge_phase
from router.scenario.memory_edits import directive_items
from router.scenario.reader import read_scenario
from router.scenario.series import agent_id
from router.scenario.source import with_variables
from router.scenario.tool_answers import answer_call, offered_tools
from router.scenario.transcript import AnsweredCall, ToolStep, TurnKey, ordered_transcript
from tests.router.scenario.small_scenario import say, small

JUDGED = """\
scenario: s
variables: {word: otter}
agents: {ann: {tools: [look]}, bob: {}, eve: {lifetime: ephemeral}}
tools: {look: {description: d, parameters: {}, answers: [{text: t}]}}
phases:
  - {id: one, agents: [ann, bob], opening: The moon is up.}
  - id: two
    agents: [ann, eve]
    prompts: {eve: Be quiet}
    directives:
      - {agent: ann, clear_results_of: look, mode: amortize}
      - {agent: ann, forget: one}
    expect: [EXPECTED]
"""
STEP = ToolStep((AnsweredCall("c1", "look", {}, "seen"),))


def scenario(expected="{cached_share_min: 0}"):
    return read_scenario(JUDGED.replace("EXPECTED", expected).encode(), "s")


UTTERANCES = [
    say(TurnKey("one", 1, "ann"), "The  OTTER\nswims", (STEP,)),
    say(TurnKey("one", 1, "bob"), "Noted."),
    say(TurnKey("two", 1, "ann"), "My otter: Noted."),
    say(TurnKey("two", 1, "eve"), "Shh"),
]


@pytest.mark.parametrize(
    ("expected", "holds", "found"),
    [
        ("{agent: ann, says: 'MY  ${word}'}", True, "said My otter: Noted."),
        ("{agent: ann, says: [badger, noted]}", True, "said"),
        ("{agent: ann, says: the otter swims}", False, "said My otter: Noted."),
        ("{agent: ann, never_says: badger}", True, "said"),
        ("{agent: ann, never_says: '${word}'}", False, "said"),
        ("{agent: bob, hears: the otter swims}", True, "heard it"),
        ("{agent: eve, hears: otter}", True, "heard it"),
        ("{agent: eve, never_hears: [swims, moon]}", True, "never heard it"),
        ("{agent: bob, never_hears: [seen, moon]}", False, "heard 'moon'"),
        ("{agent: eve, never_hears: shh}", True, "never"),  # its own words
        ("{agent: ann, calls: look}", False, "called nothing"),
        ("{cached_share_min: 0.5}", True, "0.750 of 200 tokens"),
        ("{agent: eve, cached_share_min: 0.6}", False, "0.500 of 100 tokens"),
    ],
)
def test_expectation_is_judged(expected, holds, found):
    figures = {
        TurnKey("two", 1, "ann"): PromptFigures(100, 100),
        TurnKey("two", 1, "eve"): PromptFigures(100, 50),
    }
    file = scenario(expected)
    (verdict,) = judge_phase(file, "two", ordered_transcript(file, UTTERANCES), figures)
    assert (verdict.holds, verdict.found.startswith(found)) == (holds, True), verdict.found


@pytest.mark.parametrize(
    ("expected", "spelled"),
    [
        (
            "{agent: ann, never_says: ['${word}', the moon]}",
            "ann never_says '${word}' or 'the moon'",
        ),
        ("{agent: ann, calls: look}", "ann calls 'look'"),
        ("{cached_share_min: 0.5}", "cached_share_min 0.5"),
        ("{agent: eve, cached_share_min: 0}", "eve cached_share_min 0"),
    ],
)
def test_expectation_is_reported_as_written(expected, spelled):
    file = scenario(expected)
    (verdict,) = judge_phase(file, "two", ordered_transcript(file, UTTERANCES), {})
    assert verdict.expected == spelled


def test_transcript_is_ordered_as_in_the_file():
    assert list(ordered_transcript(scenario(), reversed(UTTERANCES)).values()) == UTTERANCES


def test_directives_name_results_and_messages():
    file = scenario()
    phase = file.phases[1]
    transcript = ordered_transcript(file, UTTERANCES)
    assert directive_items(file, transcript, phase, phase.directives[0]) == [
        {"tool_call_id": "c1", "replacement": "[cleared]", "mode": "amortize"}
    ]
    forgotten = directive_items(file, transcript, phase, phase.directives[1])
    assert [item["message"] for item in forgotten] == [
        {"role": "user", "content": "[one]\n\nThe moon is up."},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "The  OTTER\nswims"},
    ]


def test_tool_call_is_answered_by_its_arguments():
    file = small()
    assert answer_call(file, "marco", "lookup", {"key": {"a": 1, "b": 2}}) == "it is Oslo"
    assert answer_call(file, "marco", "lookup", '{"key": {"a": 1}, "c": 3}') == "it is Oslo"
    assert answer_call(file, "marco", "lookup", {"key": {"a": True}}) == "nothing"
    assert answer_call(file, "marco", "lookup", {"key": 1}) == "nothing"
    assert answer_call(file, "marco", "lookup", "[1") == "Error: the arguments are no JSON object"
    assert answer_call(file, "danny", "lookup", {}) == "Error: there is no tool 'lookup'"
    assert offered_tools(file, "danny") == []
    (offered,) = offered_tools(file, "marco")
    assert json.loads(json.dumps(offered))["function"]["name"] == "lookup"


def test_run_variables_are_not_expanded():
    file = with_variables(small(), {"city": "${room_a.messages[danny]}"})
    assert (
        answer_call(file, "marco", "lookup", {"key": {"a": 1}}) == "it is ${room_a.messages[danny]}"
    )
    with pytest.raises(RejectedError, match="'town' is not a variable; there are city"):
        with_variables(small(), {"town": "x"})


def test_agent_ids_depend_on_their_lifetime():
    file = scenario()
    assert agent_id(file, "ann", "run-1") == "scn.s.ann"
    assert agent_id(file, "eve", "run-1") == "scn.s.run-1.eve"
    assert agent_id(file, "ann", "run-1", "mine") == "scn.s@mine.ann"
    longest = replace(file, name="n" * 48, agents={"a" * 32: file.agents["eve"]})
    assert len(agent_id(longest, "a" * 32, "r" * 10)) <= 128
    with pytest.raises(RejectedError, match="is not a valid name"):
        agent_id(file, "ann", "a.b")

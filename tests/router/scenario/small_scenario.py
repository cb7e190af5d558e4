"""Scenarios for tests: one in YAML, and random ones with runs of them."""

import yaml
from hypothesis import strategies as st

from router.scenario.reader import read_scenario
from router.scenario.transcript import AnsweredCall, ToolStep, Utterance
from router.scenario.turn_order import TurnTable

SMALL = """\
scenario: cells
variables: {city: Oslo}
agents:
  warden: {name: the Warden, system: "You guard a prison in ${city}."}
  marco: {name: Marco, tools: [lookup]}
  danny: {name: Danny}
tools:
  lookup:
    description: Looks things up.
    parameters: {type: object}
    answers:
      - {when: {key: {a: 1}}, text: "it is ${city}"}
      - {text: nothing}
phases:
  - id: room_a
    title: Room A
    agents: [warden, marco]
    rounds: 2
    opening: The door opens.
    prompts: {marco: You know the code.}
    ask: {marco: [First, Second]}
  - id: room_b
    agents: [warden, danny]
    order: parallel
    rounds: 2
  - id: yard
    agents: [marco, danny]
    prompts:
      marco: |
        From the room:
        ${room_a.messages[marco]}
    expect:
      - {agent: danny, never_hears: You know the code}
"""


def small():
    return read_scenario(SMALL.encode(), "small.yaml")


def say(turn, text, steps=()):
    return Utterance(turn.phase, turn.round, turn.speaker, text, steps)


KEYS = ("a", "b", "c", "d")


@st.composite
def scenarios(draw):
    """Draw a scenario that the reader accepts, of few agents and phases."""
    agents = {key: {"name": f"N {key}"} for key in KEYS}
    for key in KEYS[:2]:
        agents[key]["system"] = f"system of {key} ${{city}}"
    phases, spoken = [], []
    for at in range(draw(st.integers(1, 4))):
        speakers = draw(st.permutations(KEYS[:3]))[: draw(st.integers(1, 3))]
        rounds = draw(st.integers(1, 3))
        phase = {"id": f"p{at}", "agents": list(speakers), "rounds": rounds}
        phase["order"] = draw(st.sampled_from(["in_turn", "parallel"]))
        if draw(st.booleans()):
            phase["visible_to"] = draw(st.lists(st.sampled_from(KEYS[:3]), unique=True))
        hearers = {*speakers, *phase.get("visible_to", ())}
        if draw(st.booleans()):
            phase["opening"] = f"opening {at}"
        one = draw(st.sampled_from(sorted(hearers)))
        audible_phases = [
            p["id"] for p in phases if one in {*p["agents"], *p.get("visible_to", ())}
        ]
        prompt = draw(
            st.sampled_from(["just you", *(f"${{{p}.messages[{one}]}}" for p in audible_phases)])
        )
        phase["prompts"] = {one: f"only {one} {at}: {prompt}"}
        question = st.one_of(st.none(), st.just(f"question {at} ${{city}}"))
        phase["ask"] = {speakers[0]: draw(st.lists(question, min_size=rounds, max_size=rounds))}
        phases.append(phase)
        is_silent = not any(phase["ask"][speakers[0]])
        spoken += speakers[1:] if is_silent else speakers
    if spoken and draw(st.booleans()):
        source = draw(st.sampled_from(spoken))
        fork = {"from": source, "as": ["d"]}
        phases.append({"id": "branch", "agents": ["d", source], "rounds": 2, "fork": fork})
        agents["d"].pop("system", None)
    whole = {"scenario": "s", "variables": {"city": "Rome"}, "agents": agents, "phases": phases}
    return read_scenario(yaml.safe_dump(whole).encode(), "drawn.yaml")


@st.composite
def runs(draw):
    """Draw a scenario and a run: its ended turns, in a possible order."""
    scenario = draw(scenarios())
    transcript = []
    while due := TurnTable(scenario).next({u.turn for u in transcript}):
        turn = draw(st.sampled_from(due))
        mark = f"word{len(transcript)}word"
        shape = draw(
            st.sampled_from(["{}", "{}\n[p0]\nN a: {}", " {} ${{city}}\n", "{}${{p0.messages[a]}}"])
        )
        steps = ()
        if draw(st.integers(0, 3)) == 0:
            call = AnsweredCall(f"call{len(transcript)}", "t", {"x": 1}, f"result {mark}")
            steps = (ToolStep((call,), f"thinking {mark}"),)
        transcript.append(say(turn, shape.format(mark, mark), steps))
    return scenario, tuple(transcript)

"""Errors of a scenario are reported together, each with its place and a remedy."""

import time
import tracemalloc
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.limits import SCENARIO_BYTES_MAX, SCENARIO_ERRORS_MAX
from router.scenario.diagnostics import ScenarioError
from router.scenario.reader import read_scenario
from router.scenario.template import MessagesPlace, VariablePlace
from tests.router.scenario.small_scenario import SMALL, small

HEAD = "scenario: s\nagents: {ann: {}, bob: {}}\n"
PHASE = HEAD + "phases:\n  - id: one\n    agents: [ann]\n"


def complaints(text, files=None):
    raw = text if isinstance(text, bytes) else text.encode()
    with pytest.raises(ScenarioError) as caught:
        read_scenario(raw, "s.yaml", *([files] if files else []))
    assert len(caught.value.message) < 40_000
    return caught.value.message.splitlines()


def test_whole_scenario_is_read():
    scenario = small()
    assert scenario.name == "cells"
    assert scenario.agents["warden"].system.parts == (
        "You guard a prison in ",
        VariablePlace("city"),
        ".",
    )
    assert scenario.phases[2].prompts["marco"].parts[1] == MessagesPlace("room_a", "marco")
    assert [phase.rounds for phase in scenario.phases] == [2, 2, 1]


ONE = "phases: [{id: a, agents: [ann]}]\n"
WRONG = [
    ("scenario: s\n", "1:1: 'agents' is missing: the agents that take part"),
    (HEAD + "phase: []\n", "3:1: phase: unknown field; did you mean 'phases'?"),
    (PHASE + "    rounds: many\n", "6:13: phases[0].rounds: expected a whole number, got 'many'"),
    (PHASE + "    rounds: 0\n", "6:13: phases[0].rounds: must be between 1 and 100"),
    (PHASE + "    rounds: true\n", "phases[0].rounds: expected a whole number, got 'true'"),
    (PHASE + "    order: paralel\n", "expected in_turn or parallel, got 'paralel'"),
    (PHASE + "    title: 12\n", "expected text, got the number 12; put it in quotes"),
    (
        PHASE + "    visible_to: [bab]\n",
        "6:18: phases[0].visible_to[0]: 'bab' is not an agent; did you mean",
    ),
    (
        PHASE + "    agents: [ann]\n",
        "6:5: phases[0].agents: duplicate key; the first is in line 5",
    ),
    (
        PHASE + "    opening: Hi ${nmae}\n",
        "phases[0].opening: '${nmae}' is not a variable; there are none",
    ),
    (PHASE + "    opening: Hi ${a b}\n", "'${a b}' is not a placeholder; write ${variable} or"),
    (PHASE + "    opening: 'Hi ${x'\n", "'${x' is not closed; write $${ to mean ${"),
    (PHASE + "    opening: '${one.messages[ann]}'\n", "quoted to one agent only"),
    (PHASE + "    prompts: {bob: x}\n", "'bob' does not hear this phase"),
    (
        PHASE + "    ask: {ann: [a, b]}\n",
        "expected one for each of 1 rounds (null: it does not speak), got 2",
    ),
    (PHASE + "    after: [two]\n", "'two' is not an earlier phase; there are none"),
    (PHASE + "    expect: [{agent: bob, says: x}]\n", "'bob' does not speak in this phase"),
    (
        PHASE + "    expect: [{says: x}]\n",
        "phases[0].expect[0]: 'agent' is missing",
    ),
    (PHASE + "    expect: [{agent: ann}]\n", "expected exactly one of says, never_says"),
    (
        PHASE + "    expect: [{agent: ann, calls: x}]\n",
        "expect[0].calls: 'x' is not a tool; there are none",
    ),
    (PHASE + "    prompts: {ann: {file: a.txt}}\n", "prompts.ann.file: 'a.txt' cannot be read"),
    (PHASE + "  - {id: one, agents: [ann]}\n", "phases[1].id: 'one' is the id of an earlier phase"),
    (
        PHASE + "  - {id: b, agents: [ann], after: []}\n",
        "would run beside 'one', and 'ann' takes part",
    ),
    (
        PHASE + "  - {id: b, agents: [bob], prompts: {bob: '${one.messages[bob]}'}}\n",
        "phases[1].prompts.bob: ${one.messages[bob]}: 'bob' did not hear 'one'; add it to",
    ),
    (
        PHASE + "  - {id: b, agents: [bob], prompts: {bob: '${one.messages[ann]}'}}\n",
        "'bob' reads this text, so write ${one.messages[bob]}",
    ),
    (
        PHASE + "  - {id: b, agents: [bob], after: [], prompts: {bob: '${one.messages[bob]}'}}\n",
        "'one' has not ended when this phase begins",
    ),
    (PHASE + "    prompts: {ann: '${two.messages[ann]}'}\n", "'two' is not a phase; there are one"),
    (PHASE + "    fork: {from: bob, as: [ann]}\n", "fork.from: 'bob' has not spoken before"),
    (
        PHASE
        + "    ask: {ann: [null]}\n  - {id: b, agents: [bob], fork: {from: ann, as: [bob]}}\n",
        "phases[1].fork.from: 'ann' has not spoken before this phase",
    ),
    (
        PHASE + "  - {id: b, agents: [ann], fork: {from: ann, as: [bob]}}\n",
        "phases[1].fork.as[0]: 'bob' is not among the phase's agents; add it there",
    ),
    (PHASE + "    directives: [{agent: ann, forget: two}]\n", "'two' is not an earlier phase"),
    (
        PHASE + "    directives: [{agent: ann}]\n",
        "expected exactly one of clear_results_of, forget",
    ),
    (
        "scenario: My Game\nagents: {a: {}}\nphases: []\n",
        "scenario: 'My Game' is invalid: lower-case",
    ),
    (
        HEAD.replace("bob: {}", "bob: {name: ANN}") + "phases: [{id: a, agents: [ann]}]\n",
        "is the name of 'ann'",
    ),
    (
        HEAD.replace("bob: {}", "bob: {name: You}") + "phases: [{id: a, agents: [ann]}]\n",
        "means the hearer",
    ),
    ("- a\n", "1:1: expected a map (scenario, agents, phases"),
    ("", "1:1: the file is empty"),
    ("a: [1\n", "close the bracket"),
    (
        "{a: ${b}}\n",
        "1:6: invalid YAML: did not find expected ',' or '}'; close the bracket, or",
    ),
    ("a: b: c\n", "put a text with ': ' in quotes"),
    (
        "a:\n\tb: 1\n",
        "2:1: invalid YAML: found character that cannot start any token; indent with",
    ),
    ("a: 'b\n", "a quote is not closed"),
    ('a: "\\q"\n', "use single quotes, or write \\\\ for \\"),
    ("a: *\n", "put a text that begins with * or & in quotes"),
    ("a: |b\n", "begin the text after | in the next line"),
    ("a:\n  b: 1\n c: 2\n", "3:2: invalid YAML: did not find expected key; indent this line like"),
    ("a: 'it's'\n", "put the whole text in quotes"),
    ("a: &x 1\n", "1:4: a: the anchor '&x' is not used here"),
    ("a: [*x]\n", "1:5: a[0]: the alias '*x' is not followed; write it out"),
    ("{<<: {a: 1}}\n", "merge keys ('<<') are not followed"),
    ("a: !!python/object:os.system x\n", "1:4: a: the tag"),
    ("a: !!str 5\n", "put text in quotes instead"),
    ("{[a]: 1}\n", "a key must be text"),
    ("a: 1\n---\nb: 2\n", "a second document begins"),
    ("{{x}}: 1\n", "quote text that begins with { or ["),
    ("a: {b: 1,\n\tc: 2}\nd\n\te: 1\n", "not tabs"),
    ("%YAML 3.0\n---\na: 1\n", "leave out the line that begins with %YAML"),
    ("a: " + "[" * 20 + "]" * 20 + "\n", "levels; quote a text with brackets"),
    ("a: .inf\n", "1:4: .inf is not allowed; write a finite number"),
    ("a: -.INF\n", "-.INF is not allowed"),
    ("a: .NaN\n", ".NaN is not allowed"),
    (PHASE + "    rounds: 999999999999999999999\n", "rounds: must be between 1 and 100"),
    (PHASE + "    after: [one]\n", "phases[0].after[0]: 'one' cannot come after itself"),
    (HEAD.replace("bob: {}", 'bob: {name: "Bo\\Lb"}') + ONE, "without colons, brackets and invis"),
    (HEAD.replace("bob: {}", 'bob: {name: "Bo\\u200bb"}') + ONE, "invisible characters"),
    (HEAD.replace("bob: {}", 'bob: {name: "Bo\\u202Eb"}') + ONE, "invisible characters"),
    (
        HEAD.replace("bob: {}", 'bob: {name: "B\u043eb"}') + ONE,
        "'\u043e' (U+043E) looks like another",
    ),
    (HEAD.replace("bob: {}", 'bob: {name: "\uff21nn"}') + ONE, "is the name of 'ann'"),
    (HEAD.replace("bob: {}", 'bob: {name: "a\\nb"}') + ONE, "'a\\nb' is invalid"),
    ('title: "a\\Pb"\n' + HEAD + ONE, "one line without invisible characters"),
    (b"a: \xff\n", "1:4: this byte is not UTF-8"),
    ("a: b\nc: \x07\n", "2:4: the character U+0007 is not allowed"),
]


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_scalars_are_read_as_in_yaml_1_2(word):
    text = HEAD + "tools:\n  t:\n    description: d\n    parameters: {type: object}\n"
    text += f"    answers: [{{when: {{flag: {word}, n: 0x1F, o: 0o17}}, text: y}}]\n" + ONE
    scenario = read_scenario(text.encode(), "s.yaml")
    assert scenario.tools["t"].answers[0].when == {"flag": True, "n": 31, "o": 15}


@pytest.mark.parametrize(
    "name", ["Zo\u00eb", "\u041c\u0430\u0440\u043a\u043e", "\u9a6c\u53ef Marco", "Dr. B 2"]
)
def test_names_of_one_alphabet_are_accepted(name):
    text = HEAD.replace("bob: {}", f"bob: {{name: {name}}}") + ONE
    assert read_scenario(text.encode(), "s.yaml").shown_name("bob") == name


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_error_is_reported_with_position_and_remedy(text, expected):
    found = complaints(text)
    assert any(expected in line for line in found), "\n".join(found)
    assert all(line.startswith("s.yaml:") for line in found)


def test_all_errors_are_reported_together_in_order():
    text = dedent("""\
        scenario: s
        titel: x
        agents: {ann: {tols: []}, bob: {max_tokens: -1}}
        phases:
          - {id: a, agents: [ann, bobb]}
          - {id: b, agents: [ann], rounds: 1000}
        """)
    found = complaints(text)
    assert [line.split(" ")[0] for line in found] == [
        "s.yaml:2:1:",
        "s.yaml:3:16:",
        "s.yaml:3:45:",
        "s.yaml:5:27:",
        "s.yaml:6:36:",
    ]


def test_reported_errors_are_bounded():
    found = complaints(PHASE + "".join(f"    x{n}: 1\n" for n in range(1_000)))
    assert len(found) == SCENARIO_ERRORS_MAX + 1
    assert found[-1] == "s.yaml: there are more errors, reported once these are fixed"


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30))
HOSTILE = {
    "laughs": "a0: &a0 x\n" + BOMB,
    "circle": "a: &a [*a]\n",
    "depth": "[" * 400_000,
    "depth of maps": "{a: " * 200_000,
    "depth by indent": "\n".join(" " * n + "a:" for n in range(1_000)),
    "nodes": "[" + "a," * 400_000 + "]",
    "keys": "{" + "".join(f"k{n}: 1, " for n in range(80_000)) + "}",
    "equal keys": "{" + "k: 1, " * 100_000 + "}",
    "scalar": "a: " + "x" * 1_000_000,
    "block": "a: |\n" + "  x\n" * 250_000,
    "anchors": "".join(f"a{n}: &b{n} 1\n" for n in range(50_000)),
    "comments": "# x\n" * 250_000,
    "number": "scenario: " + "9" * 60_000,
    "places": PHASE + "    opening: '" + "${a}" * 15_000 + "'\n",
    "openings": PHASE + "    opening: '" + "${" * 30_000 + "'\n",
    "unknown agents": PHASE + "    visible_to: [" + "x, " * 15_000 + "]\n",
    "unknown fields": PHASE + "".join(f"    f{n}: 1\n" for n in range(15_000)),
    "question marks": "? " * 300_000,
    "quotes": "a: '" + "''" * 500_000,
    "too large": "#" * (SCENARIO_BYTES_MAX + 1),
    "tags": "a: " + "!" * 500_000,
    "directives": "%TAG ! x\n" * 100_000,
    "flow keys": "[" + "{a: b}: c," * 80_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_rejected_in_bounded_time_and_memory(name):
    tracemalloc.start()
    began = time.process_time()
    try:
        complaints(HOSTILE[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Traced, all is slower; each takes less than a second without.
    assert time.process_time() - began < 20
    assert peak < 64 << 20


LINES = SMALL.splitlines()


@settings(max_examples=200)
@given(st.data())
def test_damaged_scenario_is_read_or_rejected(data):
    text = list(LINES)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(
            st.sampled_from(LINES)
            | st.text("{}[]:,&*!|>'\"%@`#-? \n\tab${}.~0", max_size=12)
            | st.builds(lambda s, n=at: text[n][:n] + s + text[n][n:], st.text(max_size=3))
        )
        text[at : at + data.draw(st.integers(0, 2))] = [new]
    raw = "\n".join(text).encode("utf-8", "surrogatepass")
    diagnostics = ()
    try:
        read_scenario(raw, "s.yaml")
    except ScenarioError as error:
        diagnostics = error.diagnostics
    lines = raw.count(b"\n") + 2
    assert all(1 <= c.line <= lines and c.column >= 1 for c in diagnostics)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_rejected(raw):
    with pytest.raises(ScenarioError):
        read_scenario(raw, "s.yaml")

"""docs/own-scenario.md: its file holds, and its output is as printed."""

import re
from pathlib import Path

import mlx_lm
import pytest

from benchmarks.models import recall
from fabric.codec import to_plain
from router.cli.scenario.report import print_transcripts
from router.scenario.conversation import prompt
from router.scenario.diagnostics import ScenarioError
from router.scenario.reader import read_scenario
from router.scenario.transcript import TurnKey, ordered_transcript
from tests.support.scenario_player import Player

PAGE = (Path(__file__).parents[3] / "docs" / "own-scenario.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [text for kind, text in FENCED if kind == "yaml"]
SHOWN = [text for kind, text in FENCED if not kind]
FILE = "lighthouse.yaml"
MISTAKES = [
    ("agents: [keeper, guest]", "agents: [keeper, gest]"),
    ("    prompts:", "    promts:"),
    ("keeper: Open the door.", "keeper: [Open the door., Close it.]"),
    ("${code}.", "${cod}."),
    ("${evening.messages[guest]}", "${evening.messages[keeper]}"),
    ("${evening.messages[guest]}", "${reports.messages[guest]}"),
    ("otter lantern quartz", "4711"),
    ('says: "${code}"}', 'says: "${code}", hears: storm}'),
    ('says: "${code}"}', "says: ${code}}"),
    ("Open the door.", "Open the door: slowly."),
    ("    visible_to: []", "\tvisible_to: []"),
    ("clerk: {lifetime: ephemeral}", "clerk: {lifetime: ephemeral, system: You write.}"),
    ("title: A letter home", "after: []"),
]


def stages():
    """Yield the file after each of the page's steps."""
    text = ""
    for block in BLOCKS:
        if block.startswith(("scenario:", "  - id:")):
            text += block
        else:
            text = text.replace("agents:\n", "agents:\n" + block, 1)
        yield text


def test_each_step_leaves_a_valid_file():
    first, *_, last = (read_scenario(text.encode(), FILE) for text in stages())
    turns = sum(len(list(phase.turns)) for phase in first.phases)
    assert f"lighthouse: {turns} turns in {len(first.phases)} phases, no errors\n" in SHOWN
    assert len(BLOCKS) == 5
    assert len(last.phases) == 5


def test_output_is_as_documented(capsys):
    whole = list(stages())[-1]
    scenario = read_scenario(whole.encode(), FILE)
    player = Player(scenario, mlx_lm.load(str(recall.DEFAULT_OUT))[:2]).play()
    assert [v.expectation for v in player.verdicts if not v.holds] == []
    assert len(player.verdicts) == 5

    transcript = ordered_transcript(scenario, player.transcript)
    rows = [to_plain(utterance) for utterance in transcript.values()]
    for phases in ("evening", "morning"), tuple(phase.id for phase in scenario.phases):
        phase_rows = [row for row in rows if row["phase"] in phases]
        print_transcripts([{"arm": "warm", "number": 1, "transcript": phase_rows}])
        assert any(capsys.readouterr().out in block for block in SHOWN)
    message = prompt(scenario, transcript, TurnKey("letter", 1, "guest"))[-1]
    assert message.texts[0] + "\n" in SHOWN


def test_each_mistake_is_reported_as_documented():
    whole = list(stages())[-1]
    messages = []
    for right, wrong in MISTAKES:
        assert right in whole
        with pytest.raises(ScenarioError) as caught:
            read_scenario(whole.replace(right, wrong, 1).encode(), FILE)
        messages.append(caught.value.message.splitlines()[0])
    shown = [block for block in SHOWN if block.startswith(f"{FILE}:")]
    assert shown == ["\n".join(messages) + "\n"]

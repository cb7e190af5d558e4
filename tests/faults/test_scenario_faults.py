"""A node killed and an agent moved in every phase: the transcript is the undisturbed one's."""

import json
from pathlib import Path

import pytest

from router.scenario.expectations import Verdict
from router.scenario.outcome import outcome_row
from router.scenario.reader import read_scenario
from router.scenario.report import rows
from router.scenario.run_events import AgentSpoke
from router.scenario.scenario import Scenario
from router.scenario.series import ArmRun, SeriesPlan
from router.scenario.source import shipped_names, shipped_scenario
from tests.support.disturbed_run import BETWEEN, KILL, MOVE, Nemesis, perform
from tests.support.http_fabric_client import HttpFabricClient
from tests.support.local_fabric import local_fabric
from tests.support.performed import performed
from tests.support.process_fabric import process_fabric

# Per token. An answer must last longer than a move; some in shipped scenarios have two words.
STEP_S, LONG_STEP_S = 0.03, 0.12
NODES = ("mac-a", "mac-b", "mac-c")
MARCO = "otter lantern quartz, violin saddle copper, meadow falcon ember, garden harbor archive"
DANNY = "seven blue boats, nine grey gulls, two green lamps, one old mill by the river"
NIGHT = f"""
scenario: night
defaults: {{max_tokens: 40, temperature: 0}}
agents:
  marco: {{system: You remember what you are told.}}
  danny: {{system: You remember what you are told., place: {{apart_from: [marco]}}}}
  ada: {{}}
phases:
  - id: cells
    agents: [marco, danny]
    order: parallel
    visible_to: []
    prompts: {{marco: "The song of Marco goes {MARCO}.", danny: "The tale of Danny goes {DANNY}."}}
    ask: {{marco: The song of Marco goes, danny: The tale of Danny goes}}
  - id: copy
    agents: [ada, marco]
    fork: {{from: marco, as: [ada]}}
    ask: {{marco: Sing again. The song of Marco goes, ada: Sing. The song of Marco goes}}
    expect:
      - {{agent: ada, says: "{MARCO}"}}
  - id: yard
    agents: [danny, marco]
    ask: {{danny: Tell it. The tale of Danny goes, marco: Once more. The song of Marco goes}}
    expect:
      - {{agent: danny, says: "{DANNY}"}}
      - {{agent: marco, says: "{MARCO}"}}
      - {{agent: marco, hears: "{DANNY}"}}
      - {{agent: ada, never_hears: "{DANNY}"}}
"""


def transcript(performed: ArmRun) -> object:
    """Return the transcript without the ids of calls, which are new in each run."""
    shown = outcome_row([performed])["runs"][0]["transcript"]
    for call in (call for turn in shown for step in turn["steps"] for call in step["calls"]):
        del call["id"]
    return shown


def run_disturbed(
    folder: Path, scenario: Scenario, step_s: float, *, first_stays_away: bool
) -> Nemesis:
    """Perform the scenario undisturbed, then under a nemesis; compare the transcripts."""
    with local_fabric(folder / "calm", "recall", *NODES) as fabric:
        undisturbed_run = perform(fabric, scenario, folder, "calm")
    with process_fabric(folder, "recall", *NODES, step_s=step_s) as fabric:
        fabric.await_agents()
        nemesis = Nemesis(fabric, scenario, first_stays_away)
        disturbed_run = perform(fabric, scenario, folder, "storm", nemesis)
    print(*nemesis.actions, sep="\n")
    assert transcript(disturbed_run) == transcript(undisturbed_run)
    assert missed_expectations(undisturbed_run) == []
    # The cache of a killed node is recomputed elsewhere.
    cached = [
        v for v in missed_expectations(disturbed_run) if v.expectation.cached_share_min is not None
    ]
    assert missed_expectations(disturbed_run) == cached
    check_journal(folder / "storm.jsonl", disturbed_run)
    assert nemesis.repeated_answers == nemesis.misplaced_turns == []
    check_report(disturbed_run, nemesis)
    return nemesis


def missed_expectations(performed: ArmRun) -> list[Verdict]:
    """Return the failed verdicts of every phase."""
    verdicts = performed.run.verdicts.values()
    return [verdict for found in verdicts for verdict in found if not verdict.holds]


def check_journal(journal: Path, performed: ArmRun) -> None:
    """Check that the journal has each answer once, as in the transcript."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    turns = [line["of"]["utterance"] for line in lines if line["event"] == "turn"]
    steps = [line["of"] for line in lines if line["event"] == "step"]
    ordered_transcript = {json.dumps(turn, sort_keys=True) for turn in turns}
    assert len(ordered_transcript) == len(turns) == len(performed.run.state.transcript)
    assert len({(*step["turn"].values(), step["number"]) for step in steps}) == len(steps)


def check_report(performed: ArmRun, nemesis: Nemesis) -> None:
    """Check that the report names exactly the nodes on which each agent answered."""
    shown = {(r.phase, r.agent, node) for r in rows(performed.run.state) for node in r.nodes}
    assert shown == set(nemesis.answers)


def check_actions(nemesis: Nemesis, *actions: str) -> None:
    """Check that a node was killed in each phase, and that an agent was moved, too.

    Phases in which one agent answers once, with one word, end before it could be moved.
    """
    done = {(action.phase, action.kind) for action in nemesis.actions}
    for phase in nemesis.scenario.phases:
        assert (phase.id, KILL) in done
        if len(list(phase.turns)) > 1:
            assert any((phase.id, what) in done for what in actions)


@pytest.mark.nightly
def test_short_scenario_survives_kills_and_moves(tmp_path):
    scenario = read_scenario(NIGHT.encode(), "night.yaml")
    nemesis = run_disturbed(tmp_path, scenario, STEP_S, first_stays_away=True)
    check_actions(nemesis, MOVE)
    done = {(action.phase, action.kind) for action in nemesis.actions}
    assert done >= {("copy", BETWEEN), ("yard", BETWEEN)}


@pytest.mark.nightly
@pytest.mark.parametrize("first_stays_away", [False, True], ids=["back at once", "away at first"])
@pytest.mark.parametrize("name", shipped_names())
def test_shipped_scenarios_survive_kills_and_moves(name, first_stays_away, tmp_path):
    scenario = shipped_scenario(name)
    nemesis = run_disturbed(tmp_path, scenario, LONG_STEP_S, first_stays_away=first_stays_away)
    # If all answers of a phase are one word, none lasts as long as a move.
    check_actions(nemesis, MOVE, BETWEEN)


LOST = """
scenario: lost
defaults: {max_tokens: 16, temperature: 0}
agents:
  kim: {system: You remember what you are told.}
  heir: {}
phases:
  - id: told
    agents: [kim]
    prompts: {kim: The code of the lamp room is otter lantern quartz.}
    ask: {kim: Say it. The code of the lamp room is}
    expect: [{agent: kim, says: otter lantern}]
  - id: later
    agents: [kim]
    rounds: 3
    directives: [{agent: kim, forget: told}]
    ask: {kim: Try to remember. The code of the lamp room is}
    expect: [{agent: kim, never_says: otter lantern}]
  - id: copy
    agents: [heir]
    rounds: 3
    fork: {from: kim, as: [heir]}
    ask: {heir: Try to remember. The code of the lamp room is}
    expect: [{agent: heir, never_says: otter lantern}]
"""


@pytest.mark.slow
def test_directives_survive_the_loss_of_their_node(tmp_path):
    """A node is killed between two turns; the node that takes over has no record of the agent."""
    scenario = read_scenario(LOST.encode(), "lost.yaml")
    plan = SeriesPlan(scenario, "lost", "digest")
    killed: dict[str, str] = {}
    with process_fabric(tmp_path, "recall", *NODES) as fabric:

        def kill(event: object) -> None:
            if isinstance(event, AgentSpoke):
                utterance = event.utterance
                if (
                    utterance.phase not in killed
                    and utterance.phase != "told"
                    and utterance.round == 1
                ):
                    for node in killed.values():
                        fabric.revive(node)
                    killed[utterance.phase] = event.figures.node
                    fabric.kill(event.figures.node)

        speaker = HttpFabricClient(fabric.http, fabric.model_name)
        done = performed(plan, speaker, tmp_path / "journals", kill)
    assert list(killed) == ["later", "copy"]
    for phase, verdicts in done.run.verdicts.items():
        assert [v for v in verdicts if not v.holds] == [], phase

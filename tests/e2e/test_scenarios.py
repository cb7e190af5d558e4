"""`macfabric scenario run` on a real fabric keeps private speech private."""

import json
import threading

import pytest

from router.cli.main import main
from tests.support.local_fabric import local_fabric
from tests.support.waiting import wait_until

ROOMS = """
scenario: two-rooms
defaults: {max_tokens: 24, temperature: 0}
agents:
  marco: {system: You remember what you are told.}
  danny: {system: You remember what you are told., place: {apart_from: [marco]}}
phases:
  - {id: cell, agents: [marco], prompts: {marco: The vault code of Mira is otter lantern quartz.}}
  - {id: yard, agents: [danny, marco], visible_to: [],
     ask: {danny: What is new, marco: The vault code of Mira is},
     expect: [{agent: marco, says: otter lantern quartz},
              {agent: danny, never_hears: otter lantern quartz}]}
"""

FORGETS = """
scenario: forgets
defaults: {max_tokens: 24, temperature: 0}
agents: {marco: {system: You remember what you are told.}}
phases:
  - {id: told, agents: [marco], prompts: {marco: The vault code of Mira is otter lantern quartz.},
     ask: {marco: Say it. The vault code of Mira is},
     expect: [{agent: marco, says: otter lantern quartz}]}
  - {id: later, agents: [marco], directives: [{agent: marco, forget: told}],
     ask: {marco: Try to remember. The vault code of Mira is},
     expect: [{agent: marco, never_says: otter lantern quartz}]}
"""


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right") as instance:
        yield instance


@pytest.fixture
def scenario(fabric, tmp_path, capsys):
    file = tmp_path / "rooms.yaml"
    file.write_text(ROOMS)

    def run(*options):
        status = main(["scenario", "run", str(file), "--url", fabric.url, "--json", *options])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_repeated_run_returns_the_same_transcript(scenario, fabric):
    status, result = scenario("--run", "first")
    assert status == 0, result
    assert result["holds"]
    (performed,) = result["runs"]
    assert [u["speaker"] for u in performed["transcript"]] == ["marco", "danny", "marco"]
    yard = [row for row in performed["report"] if row["phase"] == "yard"]
    assert {row["agent"]: row["cached_share"] > 0.5 for row in yard}["marco"]
    nodes = {row["agent"]: row["nodes"] for row in yard}
    shown = {a: fabric.http.get(f"/v1/agents/scn.two-rooms.{a}").json() for a in nodes}
    assert shown["marco"]["owner"] != shown["danny"]["owner"]
    status, again = scenario("--run", "first")
    assert status == 0, again
    assert again["runs"][0]["transcript"] == performed["transcript"]
    for name, before in shown.items():
        after = fabric.http.get(f"/v1/agents/scn.two-rooms.{name}").json()
        assert after["revision"] == before["revision"], "an agent took another turn"


def test_cold_arm_runs_beside_warm_arm(scenario):
    status, result = scenario("--run", "pair", "--cold")
    assert status == 0, result
    cold, warm = result["runs"]
    assert [u["text"] for u in warm["transcript"]] == [u["text"] for u in cold["transcript"]]
    assert all(row["cached_tokens"] == 0 for row in cold["report"])
    assert result["savings"][-1]["phase"] is None


def test_run_starts_without_edits_of_the_previous_run(fabric, tmp_path, capsys):
    file = tmp_path / "forgets.yaml"
    file.write_text(FORGETS)
    options = ["--url", fabric.url]
    for more in [], ["--run", "forgets"], ["--run", "forgets2"], ["--cold"]:
        assert main(["scenario", "run", str(file), *options, *more]) == 0, capsys.readouterr()
        held = fabric.http.get("/v1/agents/scn.forgets.marco/directives").json()["directives"]
        assert len({each["operation"] for each in held}) == 1


def test_run_reusing_a_deleted_name_has_its_own_edits(fabric, tmp_path, capsys):
    file = tmp_path / "forgets.yaml"
    file.write_text(FORGETS.replace("scenario: forgets", "scenario: namesakes"))
    for _ in range(2):
        options = ["--url", fabric.url, "--run", "same"]
        assert main(["scenario", "run", str(file), *options]) == 0, capsys.readouterr()
        assert main(["scenario", "cancel", "same", "--url", fabric.url]) == 0


def test_erasure_with_runs_removes_the_agents_words(fabric, tmp_path, capsys):
    file = tmp_path / "forgets.yaml"
    text = FORGETS.replace("scenario: forgets", "scenario: erased")
    file.write_text(text.replace("lantern", "violin"))
    options = ["--url", fabric.url, "--json"]
    run = ["scenario", "run", str(file), *options, "--run", "quoting"]
    assert main(run) == 0, capsys.readouterr()

    def quotes():
        files = (path for path in fabric.runs_dir.rglob("*") if path.is_file())
        return {path.name for path in files if b"violin" in path.read_bytes()}

    before = quotes()
    capsys.readouterr()
    status = main(["erase", "scn.erased.marco", "--runs", *options])
    receipt = json.loads(capsys.readouterr().out)
    assert {"script.json", "outcome.json"} < before
    assert (status, receipt["removed_runs"], receipt["quoting_runs"]) == (0, ["quoting"], [])
    assert quotes() == set()
    assert fabric.http.get("/v1/scenarios/quoting").status_code == 404


CREW = """
scenario: crew
defaults: {max_tokens: 4, temperature: 0}
agents: {lead: {}, helper: {lifetime: ephemeral}}
phases:
  - {id: one, agents: [lead, helper]}
"""


def crew_agents(fabric):
    listed = fabric.http.get("/v1/agents").json()["data"]
    return {row["id"] for row in listed if row["id"].startswith("scn.crew")}


def test_ephemeral_agents_end_with_their_run(fabric, tmp_path, capsys):
    file = tmp_path / "crew.yaml"
    file.write_text(CREW)
    assert main(["scenario", "run", str(file), "--url", fabric.url]) == 0
    assert crew_agents(fabric) == {"scn.crew.lead"}
    long = CREW.replace("max_tokens: 4", "max_tokens: 64").replace("]}", "], rounds: 60}")
    fabric.http.post("/v1/scenarios", json={"yaml": long, "run": "cut"}).raise_for_status()
    wait_until(lambda: "scn.crew.cut.helper" in crew_agents(fabric))
    fabric.http.delete("/v1/scenarios/cut").raise_for_status()
    assert crew_agents(fabric) == {"scn.crew.lead"}


def test_concurrent_runs_of_the_same_agents_are_refused(fabric, tmp_path, capsys):
    file = tmp_path / "crew.yaml"
    shared = CREW.replace("scenario: crew", "scenario: shared")
    file.write_text(shared)
    command = ["scenario", "run", str(file), "--url", fabric.url]
    long = shared.replace("max_tokens: 4", "max_tokens: 64").replace("]}", "], rounds: 60}")
    fabric.http.post("/v1/scenarios", json={"yaml": long, "run": "other"}).raise_for_status()
    assert main(command) == 1
    assert "run 'other' uses the same agents" in capsys.readouterr().err
    assert main([*command, "--as", "mine"]) == 0
    fabric.http.delete("/v1/scenarios/other").raise_for_status()
    assert main(command) == 0


def test_cancelled_run_is_reported_and_resumed(fabric, tmp_path, capsys):
    file = tmp_path / "crew.yaml"
    file.write_text(CREW.replace("crew", "resumed").replace("]}", "], rounds: 30}"))
    command = ["scenario", "run", str(file), "--url", fabric.url, "--run", "stopped"]

    def cancel():
        wait_until(lambda: fabric.http.get("/v1/agents/scn.resumed.lead").is_success)
        fabric.http.delete("/v1/scenarios/stopped").raise_for_status()

    cancelling = threading.Thread(target=cancel)
    cancelling.start()
    assert main(command) == 1
    cancelling.join()
    assert "run stopped was cancelled. Resume it with --run stopped." in capsys.readouterr().err
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("all expectations hold\n")


def test_scenario_directive_clears_results_of_its_agent(fabric):
    options = ["--url", fabric.url, "--as", "clears"]
    assert main(["scenario", "run", "code-review-crew", *options]) == 0
    lead = "/v1/agents/scn.code-review-crew@clears.lead/directives"
    held = fabric.http.get(lead).json()["directives"]
    assert [each["is_applied"] for each in held] == [True, True]


def test_transcript_and_unmet_expectations_are_printed(fabric, tmp_path, capsys):
    file = tmp_path / "rooms.yaml"
    file.write_text(ROOMS.replace("says: otter lantern quartz", "says: open sesame"))
    command = ["scenario", "run", str(file), "--url", fabric.url, "--as", "unmet"]
    assert main([*command, "--transcript"]) == 1
    output = capsys.readouterr().out
    assert "\n  yard\n    danny: " in output
    assert "\n    marco: otter lantern quartz.\n" in output
    unmet = "does not hold: yard: marco says 'open sesame': said otter lantern quartz."
    assert output.splitlines().count(unmet) == 1
    assert output.endswith("\nunmet expectations: 1\n")


def follow(http, run, after=None, until="run.ended"):
    """Read a run's events up to the first one named `until`."""
    headers = {"accept": "text/event-stream"} | ({"last-event-id": after} if after else {})
    events, fields = [], {}
    with http.stream("GET", f"/v1/scenarios/{run}", headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            name, _, value = line.partition(": ")
            if name:
                fields[name] = value
            elif line == "" and "data" in fields:
                events.append((fields["event"], json.loads(fields["data"]), fields["id"]))
                fields = {}
                if events[-1][0] == until:
                    return events
    return events


def turns_of(transcript):
    return [(u["phase"], u["round"], u["speaker"], u["text"]) for u in transcript]


def start_dilemma(http, name):
    body = {"scenario": "prisoners-dilemma", "as": name, "run": name}
    started = http.post("/v1/scenarios", json=body)
    assert started.status_code == 202, started.text


def test_run_is_followed_from_any_event(fabric):
    start_dilemma(fabric.http, "dilemma")
    first = follow(fabric.http, "dilemma", until="phase.ended")
    rest = follow(fabric.http, "dilemma", after=first[-1][2])
    shown = fabric.http.get("/v1/scenarios/dilemma").json()
    assert rest[-1][1]["holds"] is True
    assert shown["holds"] is True
    utterances = [
        row["event"]["utterance"] for name, row, _ in first + rest if name == "turn.ended"
    ]
    transcript = turns_of(shown["runs"][0]["transcript"])
    assert sorted(turns_of(utterances)) == sorted(transcript)
    assert len(transcript) == 25


def test_command_line_follows_run_in_router(fabric, tmp_path, capsys):
    file = tmp_path / "rooms.yaml"
    file.write_text(ROOMS.replace("What is new", "{file: asked.txt}"))
    (tmp_path / "asked.txt").write_text("What is new")
    options = ["--url", fabric.url]
    run = ["scenario", "run", str(file), "--run", "mine", "--as", "remote", *options]
    assert main(run) == 0
    printed = capsys.readouterr()
    assert "3/3 yard: marco on" in printed.err
    assert printed.out.endswith("all expectations hold\n")
    assert main([*run, "--json"]) == 0, "the run must not start again"
    assert json.loads(capsys.readouterr().out)["turns"] == {"done": 3, "total": 3}
    assert main(["scenario", "runs", *options, "--json"]) == 0
    listed = {row["id"]: row["state"] for row in json.loads(capsys.readouterr().out)["data"]}
    assert listed["mine"] == "ended"
    assert main(["scenario", "cancel", "mine", *options]) == 0
    assert "deleted" in capsys.readouterr().out


def test_run_is_cancelled_and_deleted(fabric):
    body = {
        "yaml": ROOMS.replace("max_tokens: 24", "max_tokens: 2000"),
        "as": "gone",
        "run": "gone",
    }
    assert fabric.http.post("/v1/scenarios", json=body).status_code == 202
    assert fabric.http.delete("/v1/scenarios/gone").json()["cancelled"] is True
    assert fabric.http.get("/v1/scenarios/gone").json()["state"] == "cancelled"
    assert fabric.http.delete("/v1/scenarios/gone").json()["deleted"] is True
    assert fabric.http.get("/v1/scenarios/gone").status_code == 404


def test_run_continues_after_router_restart(fabric):
    start_dilemma(fabric.http, "undisturbed")
    follow(fabric.http, "undisturbed")
    start_dilemma(fabric.http, "again")
    before = follow(fabric.http, "again", until="phase.ended")
    fabric.restart_router()
    events = follow(fabric.http, "again")
    done = sum(name == "turn.ended" for name, *_ in before)
    assert events[-1][1]["holds"] is True
    assert sum(name == "turn.ended" for name, *_ in events) == 25
    assert sum(name == "turn.began" for name, *_ in events) <= 25 - done
    whole = fabric.http.get("/v1/scenarios/undisturbed").json()
    again = fabric.http.get("/v1/scenarios/again").json()
    assert turns_of(again["runs"][0]["transcript"]) == turns_of(whole["runs"][0]["transcript"])

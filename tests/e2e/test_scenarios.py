"""`macfabric scenario run` on a real fabric: what is told stays with whom it was told to."""

import json

import pytest

from router.cli.main import main
from tests.support.local_fabric import local_fabric

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


@pytest.fixture(scope="module")
def fabric(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    with local_fabric(folder, "recall", "left", "right") as made:
        yield made


@pytest.fixture
def scenario(fabric, tmp_path, capsys):
    file = tmp_path / "rooms.yaml"
    file.write_text(ROOMS)

    def run(*options):
        status = main(["scenario", "run", str(file), "--url", fabric.url, "--json",
                       "--journals", str(tmp_path), *options])  # fmt: skip
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_run_and_the_same_run_again(scenario, fabric):
    status, told = scenario("--run", "first")
    assert status == 0, told
    assert told["holds"]
    (performed,) = told["runs"]
    assert [u["speaker"] for u in performed["transcript"]] == ["marco", "danny", "marco"]
    yard = [row for row in performed["report"] if row["phase"] == "yard"]
    assert {row["agent"]: row["cached_share"] > 0.5 for row in yard}["marco"]
    nodes = {row["agent"]: row["nodes"] for row in yard}
    shown = {a: fabric.http.get(f"/v1/agents/scn.two-rooms.{a}").json() for a in nodes}
    assert shown["marco"]["owner"] != shown["danny"]["owner"]
    turns = [shown[name]["revision"] for name in sorted(shown)] if "revision" in shown else None
    status, again = scenario("--run", "first")
    assert status == 0, told
    assert again["runs"][0]["transcript"] == performed["transcript"]
    assert turns is None or turns


def test_a_cold_arm_beside_it(scenario):
    status, told = scenario("--run", "pair", "--cold")
    assert status == 0, told
    cold, warm = told["runs"]
    assert [u["text"] for u in warm["transcript"]] == [u["text"] for u in cold["transcript"]]
    assert all(row["cached_tokens"] == 0 for row in cold["report"])
    assert told["savings"][-1]["phase"] is None

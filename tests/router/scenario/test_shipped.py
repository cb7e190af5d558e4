"""The shipped scenarios: in shape, and played by the recall model with all expectations held."""

from pathlib import Path

import jsonschema
import mlx_lm
import pytest
import yaml

from benchmarks.models import recall
from fabric.errors import NotFoundError
from router.scenario.reader import json_schema
from router.scenario.source import shipped_file, shipped_names, shipped_scenario
from tests.support.samples import sample
from tests.support.scenario_player import Player

TURNS = {
    "code-review-crew": 6,
    "debate": 11,
    "expert-routing": 27,
    "gossip-network": 18,
    "prisoners-dilemma": 25,
}


@pytest.fixture(scope="module")
def loaded():
    return mlx_lm.load(str(recall.DEFAULT_OUT))[:2]


def test_shipped_scenarios_have_documented_sizes():
    found = {name: shipped_scenario(name) for name in shipped_names()}
    assert {n: sum(len(list(p.turns)) for p in s.phases) for n, s in found.items()} == TURNS
    assert len(found["prisoners-dilemma"].phases) == 5
    assert len(found["gossip-network"].phases) == 3
    assert len(found["expert-routing"].agents) == 10 + 1
    with pytest.raises(NotFoundError, match="did you mean 'debate'"):
        shipped_file("debat")


@pytest.mark.parametrize("name", TURNS)
def test_shipped_scenarios_match_the_schema(name):
    whole = yaml.safe_load(shipped_file(name).read_text())
    assert whole["scenario"] == name
    jsonschema.Draft202012Validator(json_schema()).validate(whole)


@pytest.mark.parametrize("name", sample(TURNS, "debate"))
def test_recall_model_meets_all_expectations(name, loaded):
    player = Player(shipped_scenario(name), loaded).play()

    assert len(player.transcript) == TURNS[name]
    assert [v for v in player.verdicts if not v.holds] == []
    assert len(player.verdicts) == sum(len(p.expect) for p in player.scenario.phases)


def test_expert_articles_have_required_length(loaded):
    articles = sorted((Path(shipped_file("debate")).parent / "articles").glob("*.txt"))
    tokens = [len(loaded[1].encode(path.read_text())) for path in articles]
    assert len(tokens) == 10
    assert all(2_000 <= n <= 4_000 for n in tokens), tokens

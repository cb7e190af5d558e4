"""The demo's checks of answers, and its script."""

from dataclasses import replace

import pytest

from router.cli.demo.demo_client import DemoTurn, Pulse
from router.cli.demo.demo_script import NAMES, SUBJECTS, make_agents
from router.cli.demo.demo_table import (
    COLD,
    DISK,
    HOT,
    KILLED,
    PEER,
    STATES,
    as_record,
    problem_of,
    ratios,
    show,
)

GOOD = DemoTurn(
    agent="mira",
    state=HOT,
    question="The vault code of Mira is",
    expected="otter lantern",
    answer=" otter lantern",
    right=True,
    first_token_ms=20.0,
    node="node-a",
    cache="hot",
    match="extend",
    cached_tokens=2_000,
    prompt_tokens=2_030,
)
COLD_TURN = replace(GOOD, state=COLD, cache="cold", match="none", cached_tokens=0)
# Claim, and a part of the objection ("" for none).
CLAIMS = {
    "a true hot turn": (GOOD, ""),
    "a true cold turn": (COLD_TURN, ""),
    "a true disk turn": (replace(GOOD, state=DISK, cache="disk"), ""),
    "a true peer turn": (replace(GOOD, state=PEER, cache="peer"), ""),
    "a wrong answer": (replace(GOOD, right=False, answer="maple"), "instead of"),
    "the wrong tier": (replace(GOOD, state=DISK), "expected cache disk"),
    "no header": (replace(GOOD, cache=""), "reports nothing"),
    "too little reused": (replace(GOOD, cached_tokens=100), "at least 1827"),
    "a warm cold turn": (replace(COLD_TURN, cached_tokens=7), "7 tokens reused"),
    "an error": (replace(GOOD, problem="APITimeoutError"), "APITimeoutError"),
    "a killed node's agent, cold elsewhere": (replace(COLD_TURN, state=KILLED), ""),
    "a killed node's agent, wrong": (replace(GOOD, state=KILLED, right=False), "instead of"),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_turn_claims_are_verified(name):
    turn, objection = CLAIMS[name]
    problem = problem_of(turn, COLD_TURN if turn.state != COLD else None)

    assert objection in problem
    assert bool(problem) == bool(objection)


def test_ratios_use_medians():
    turns = [replace(COLD_TURN, first_token_ms=ms) for ms in (900.0, 1_000.0, 5_000.0)]
    turns += [replace(GOOD, first_token_ms=ms) for ms in (10.0, 20.0, 30.0)]
    turns += [replace(GOOD, state=DISK, cache="disk", first_token_ms=100.0)]

    assert ratios(turns) == {"cold/hot": 50.0, "cold/disk": 10.0}
    assert ratios([GOOD]) == {}


def test_results_table_shows_answers_and_times(capsys):
    turns = [COLD_TURN, GOOD, replace(GOOD, state=PEER, right=False, cache="peer")]
    show(["mira"], turns, Pulse("http://127.0.0.1:1"), 61.5)
    out = capsys.readouterr().out

    assert "20 (cold, node-a)" in out
    assert "20 (peer, node-a) WRONG" in out
    assert "2 of 3 answers right" in out
    assert "61.5 s in all" in out


def test_records_contain_every_figure():
    assert as_record([GOOD])[0]["cached_tokens"] == 2_000


def test_demo_script_is_deterministic():
    agents = make_agents()

    assert agents == make_agents()
    assert [agent.name.capitalize() for agent in agents] == list(NAMES)
    assert len({fact.value for agent in agents for fact in agent.facts}) == 20


def test_each_state_has_a_fact_stated_exactly_once():
    assert len(SUBJECTS) == len(STATES)
    for agent in make_agents():
        for fact in agent.facts:
            assert agent.briefing.count(fact.question) == 1
            assert fact.statement in agent.briefing
            assert fact.statement == f"{fact.question} {fact.value}."

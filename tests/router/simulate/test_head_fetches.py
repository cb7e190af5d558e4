"""Beginnings of prompts cross each link once, where that takes less time than computing them."""

import json

import pytest

from router.simulate import head_fetches
from router.simulate.faults import Fault, FaultKind
from router.simulate.head_fetches import HeadFetches
from router.simulate.run import Conditions, SimulatedRun
from router.simulate.traces import arrivals_of, read_trace
from tests.router.simulate.small import fleet, node

HEAD, OWN, AGENTS = 32, 2, 8  # blocks of 128 tokens
HEAD_TOKENS, OWN_TOKENS = HEAD * 128, OWN * 128
THREE_EQUAL = fleet(*(node(name, prefill_tokens_per_s=512.0) for name in ("a", "b", "c")))


def burst(tmp_path, apart_ms=0):
    """Return a trace of agents with one beginning, at the same moment or one by one."""
    rows = [
        {
            "timestamp": agent * apart_ms,
            "input_length": HEAD_TOKENS + OWN_TOKENS,
            "output_length": 20,
            "block_length": 128,
            "hash_ids": [*range(HEAD), *(1_000 * (agent + 1) + each for each in range(OWN))],
        }
        for agent in range(AGENTS)
    ]
    path = tmp_path / "burst.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_trace(path)


def play_run(rows, policy="router-round-robin", *, on=THREE_EQUAL, **more):
    run = SimulatedRun(on, policy, 1, arrivals_of(rows), **more)
    return run, run.play()


def test_concurrent_agents_compute_one_head_on_three_nodes(tmp_path):
    run, outcome = play_run(burst(tmp_path), on=THREE_EQUAL.with_link_mbit(10_000))

    assert {name for name, each in run.machines.items() if each.turns_count} == {"a", "b", "c"}
    assert outcome.computed_tokens == HEAD_TOKENS + AGENTS * OWN_TOKENS
    assert outcome.moved_bytes == 2 * HEAD_TOKENS * 36_864, "across each link once"
    assert run.heads.count == 2


def test_stored_head_is_sent_to_the_other_nodes(tmp_path):
    run, outcome = play_run(burst(tmp_path, apart_ms=60_000))

    assert outcome.computed_tokens == HEAD_TOKENS + AGENTS * OWN_TOKENS
    assert run.heads.count == 2
    travel_s = head_fetches.START_S + HEAD_TOKENS * 36_864 / (0.8 * 125e6)
    second_s = run.dispatcher.counters.ttft_s[1]
    assert second_s == pytest.approx(travel_s + OWN_TOKENS / 512, abs=0.2)


def test_head_is_computed_where_the_link_is_slow(tmp_path):
    run, outcome = play_run(burst(tmp_path), on=THREE_EQUAL.with_link_mbit(50))

    assert run.heads.count == outcome.moved_bytes == 0
    assert outcome.computed_tokens == 3 * HEAD_TOKENS + AGENTS * OWN_TOKENS


def test_node_computes_a_head_whose_fetch_would_take_longer(tmp_path):
    """The router knows the nominal rate, the nodes the real one."""
    slow, on = Conditions(slow_links=1_000.0), THREE_EQUAL.with_link_mbit(10_000)
    run, outcome = play_run(burst(tmp_path), on=on, conditions=slow)

    assert run.heads.count == outcome.moved_bytes == 0
    assert outcome.computed_tokens == 3 * HEAD_TOKENS + AGENTS * OWN_TOKENS


def test_baselines_compute_heads_on_each_node(tmp_path):
    run, outcome = play_run(burst(tmp_path), "round-robin")

    assert run.heads.count == 0
    assert outcome.computed_tokens == 3 * HEAD_TOKENS + AGENTS * OWN_TOKENS


def test_waiting_turns_compute_the_head_of_a_lost_lender(tmp_path):
    lost = Conditions((Fault(FaultKind.LOSE, "a", 4.0, 60.0),))
    run, outcome = play_run(burst(tmp_path), on=THREE_EQUAL.with_link_mbit(10_000), conditions=lost)

    assert outcome.turns == AGENTS
    assert outcome.retried > 0
    assert outcome.computed_tokens <= 3 * (HEAD_TOKENS + OWN_TOKENS) + AGENTS * OWN_TOKENS
    assert not any(run.heads._to.values())
    assert not any(run.heads._from.values())


def test_second_fetch_of_a_beginning_is_detected(monkeypatch, tmp_path):
    """The injected fault: turns do not join a fetch in progress."""
    monkeypatch.setattr(HeadFetches, "_joinable", lambda *_: None)
    with pytest.raises(AssertionError):
        test_concurrent_agents_compute_one_head_on_three_nodes(tmp_path)

"""Placement decisions as operators see them, over fake nodes, and as traces."""

import json
from dataclasses import fields

import pytest

from fabric.control.node_calls import TierBytes
from fabric.ids import AgentId, NodeName
from fabric.turn.alignment import common_prefix
from fabric.turn.generation import Admitted, CacheTier, MatchKind
from router import limits
from router.admin.views import fleet_model
from router.placement.decision import Decision, How, Terms
from router.placement.profiles import NodeProfile
from router.prompt import raw_prompt
from router.simulate.fleet_file import read_fleet
from router.simulate.traces import read_trace
from router.telemetry import Telemetry
from router.turns import decision_log
from router.turns.decision_log import DecisionLog, trace_rows
from router.turns.open_turn import EndedTurn
from tests.router.rig import rig
from tests.support.clocks import ManualClock

pytestmark = pytest.mark.anyio
PATH = "/v1/placement/decisions"
LONG = "A sentence of the beginning that all of them have. " * 60


async def rows_of(fabric, query=""):
    answer = await fabric.http().get(PATH + query)
    assert answer.status_code == 200
    return answer.json()["data"]


async def test_entries_have_the_terms_and_the_outcome_newest_first():
    async with rig("ab") as fabric:
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 1_000.0}
        fabric["node-b"].view_changes = {"prefill_tokens_per_s": 400.0}
        await fabric.fleet.membership.refresh()
        first = await fabric.chat(LONG, agent="alice")
        await fabric.chat(LONG, "x", "and now?", agent="alice")
        stay, begin = await rows_of(fabric)
        newest = await rows_of(fabric, "?limit=1")

    assert (begin["how"], stay["how"]) == ("recompute", "stay")
    assert {begin["node"], stay["served_by"]} == {first.headers["x-macfabric-node"]}
    assert newest == [stay]
    assert begin["terms"].keys() == {field.name for field in fields(Terms)}
    assert begin["terms"]["prefill_s"] > 0.5
    assert begin["first_token_estimate_s"] == pytest.approx(begin["terms"]["prefill_s"], abs=0.1)
    assert (begin["outcome"], begin["completion_tokens"] > 0) == ("ok", True)
    assert 0 <= begin["admitted_s"] <= begin["first_token_s"] <= begin["ended_s"]
    assert stay["cached_tokens"] > 0
    assert "alice" not in json.dumps([begin, stay]), "decisions do not name agents"


async def test_move_before_a_turn_is_its_decision():
    async with rig("ab") as fabric:
        home = (await fabric.chat("hello", agent="alice")).headers["x-macfabric-node"]
        await fabric.fleet.membership.refresh(relist=True)
        entry = fabric.fleet.ledger.begin(NodeName(home), 20.0, cold=False)
        await fabric.chat("hello", "x", "and now?", agent="alice")
        fabric.fleet.ledger.end(entry)
        moved = (await rows_of(fabric, "?limit=1"))[0]

    assert (moved["how"], moved["from"]) == ("move", home)
    assert moved["node"] == moved["served_by"] != home
    assert moved["terms"]["price_s"] > 0


async def test_failed_turn_keeps_its_outcome_and_is_no_trace():
    async with rig("a") as fabric:
        fabric["node-a"].behaviour.break_after = 1
        await fabric.chat("one two three four", agent="alice")
        row = (await rows_of(fabric))[0]
        trace = (await fabric.http().get(f"{PATH}?format=trace")).text

    assert row["outcome"] != "ok"
    assert trace == ""


async def test_metrics_compare_estimates_with_measurements():
    async with rig("a") as fabric:
        fabric["node-a"].view_changes = {"prefill_tokens_per_s": 100.0}
        await fabric.fleet.membership.refresh()
        await fabric.chat(LONG, agent="alice")
        text = (await fabric.http().get("/metrics")).text

    assert 'macfabric_estimated_seconds_total{term="prefill"}' in text
    assert 'macfabric_first_token_seconds_total{part="admission"}' in text
    assert "macfabric_ttft_estimate_ratio_count 1.0" in text


@pytest.mark.parametrize(
    "query", ["?limit=0", "?limit=-1", "?limit=x", "?limit=9999999", "?format=csv"]
)
async def test_wrong_query_is_refused(query):
    async with rig("a") as fabric:
        answer = await fabric.http().get(PATH + query)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in query


async def test_trace_of_a_router_is_read_by_the_simulator(tmp_path):
    async with rig("ab") as fabric:
        await fabric.chat(LONG, agent="alice")
        await fabric.chat(LONG, "x", "and now? " * 100, agent="alice")
        await fabric.chat(LONG, "other", agent="bob")
        answer = await fabric.http().get(f"{PATH}?format=trace")
    path = tmp_path / "log.jsonl"
    path.write_bytes(answer.content)
    one, two, other = read_trace(path)

    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert one.agent == two.agent != other.agent
    assert two.waits_for == (one.name,)
    assert [each.continues for each in (one, two, other)] == [False, True, False]
    assert one.blocks[:4] == two.blocks[:4] == other.blocks[:4]
    assert one.blocks[-1] != two.blocks[-1]
    assert one.block_tokens == 128
    assert one.ttft_s is not None


async def test_fleet_of_a_router_is_read_by_the_simulator(tmp_path):
    """Speeds are those measured by turns, not those reported by nodes."""
    async with rig("ab") as fabric:
        for name, speed in (("node-a", 700.0), ("node-b", 400.0)):
            fabric[name].view_changes = {
                "prefill_tokens_per_s": speed,
                "decode_tokens_per_s": 40.0,
                "bytes_per_token": 36_864,
                "bytes": TierBytes(2 << 30, 3 << 30),
                "free": TierBytes(6 << 30, 5 << 30),
            }
        await fabric.fleet.membership.refresh()
        note_prompts(fabric.fleet, NodeName("node-a"), start=600.0, half_tokens=20_000)
        answer = await fabric.http().get(f"{PATH}?format=fleet")
    path = tmp_path / "fabric.yaml"
    path.write_bytes(answer.content)
    learnt, reported = read_fleet(str(path)).each()

    assert read_fleet(str(path)).kv_bytes_per_token == 36_864
    assert learnt.prefill_tokens_per_s == pytest.approx(600.0, rel=0.05)
    assert learnt.context_half_tokens == pytest.approx(20_000, rel=0.1)
    assert (reported.prefill_tokens_per_s, reported.decode_tokens_per_s) == (
        pytest.approx(400.0, rel=0.05),
        40.0,
    )
    assert (learnt.hot_bytes, learnt.disk_bytes) == (8 << 30, 8 << 30)


def note_prompts(fleet, node, start, half_tokens):
    """Record prompts of a node whose speed falls with the position."""
    now_s = 1e6
    for position in (2_048, 10_240, 40_960) * 20:
        tokens_per_s = start / (1 + position / half_tokens)
        before = fleet.profiles.note_progress(node, None, position - 128, now_s)
        now_s += 256 / tokens_per_s
        fleet.profiles.note_progress(node, before, position + 128, now_s)


def fit_decode(speeds):
    """Return the fit to decode speeds by batch."""
    return fleet_model._decode(NodeProfile(decode=speeds), 50.0)


def test_batch_exponent_is_fitted_to_the_speeds_of_answers():
    alone, exponent, batches = 50.0, 0.2, (1.0, 2.0, 3.5, 6.5, 12.0)
    speeds = [alone * batch ** (0.5 - exponent) for batch in batches]

    assert fit_decode((*speeds,)) == (pytest.approx(alone), pytest.approx(exponent))
    assert fit_decode((speeds[0], None, None, None, None)) == (pytest.approx(alone), 0.5)
    assert fit_decode((None,) * 5) == (50.0, 0.5)


def new_log():
    return DecisionLog(ManualClock(), Telemetry())


def add(log, text, agent="a", bytes_per_token=4):
    admitted = Admitted(
        AgentId(agent),
        NodeName("n"),
        1,
        CacheTier.COLD,
        MatchKind.NONE,
        prompt_tokens=len(text) // bytes_per_token,
        cached_tokens=0,
        match_reason="",
    )
    entry = log.add(agent, Decision(How.RECOMPUTE, NodeName("n")), admitted, raw_prompt(text), 0.0)
    log.end(entry, EndedTurn("ok", 5, 1.0))
    return entry


def test_oldest_entries_go(monkeypatch):
    log = new_log()
    monkeypatch.setattr(decision_log, "DECISIONS_KEPT_MAX", 3)
    kept = [add(log, "hello") for _ in range(5)][2:]
    assert list(log.entries) == kept
    monkeypatch.setattr(decision_log, "DECISION_PIECES_MAX", 20)
    latest = add(log, LONG * 10)

    assert list(log.entries) == [latest], "a long prompt displaces many"
    assert limits.DECISIONS_KEPT_MAX > 100


def test_blocks_of_different_texts_have_different_numbers():
    log = new_log()
    add(log, LONG, "a")
    add(log, "x" + LONG, "b")
    one, other = trace_rows(log.entries)

    assert not set(one["hash_ids"]) & set(other["hash_ids"])
    assert len(one["hash_ids"]) == len(set(one["hash_ids"])) == -(-(len(LONG) // 4) // 128)


def test_prompts_of_other_bytes_per_token_begin_alike_in_a_trace():
    log, text = new_log(), LONG * 4
    add(log, text, "a", bytes_per_token=4)
    add(log, text + LONG * 4, "b", bytes_per_token=3)
    one, other = trace_rows(log.entries)
    common = common_prefix(one["hash_ids"], other["hash_ids"])

    assert common >= 0.6 * len(one["hash_ids"])

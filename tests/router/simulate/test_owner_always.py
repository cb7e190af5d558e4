"""The earlier placement: owners keep their agents, and only first turns are placed."""

import json

from router.simulate.faults import Fault, FaultKind
from router.simulate.run import Conditions, SimulatedRun
from router.simulate.traces import arrivals_of, read_trace
from tests.router.simulate.small import fleet, node, workload_run
from tests.router.simulate.test_head_fetches import AGENTS, HEAD_TOKENS, OWN_TOKENS, burst

TWINS = fleet(node("a"), node("b"), heartbeat_s=0.5).with_link_mbit(10_000)


def run_of(tmp_path, rows, policy):
    path = tmp_path / "day.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    away = Conditions((Fault(FaultKind.DRAIN, "b", 0.0, 20.5),))  # until all others have a node
    run = SimulatedRun(TWINS, policy, 1, arrivals_of(read_trace(path)), away)
    return run, run.play()


def row(at_s, session, first, blocks, more=()):
    ids = [*range(first, first + blocks), *more]
    return {
        "timestamp": 1_000 * at_s,
        "input_length": 128 * len(ids),
        "output_length": 4,
        "block_length": 128,
        "hash_ids": ids,
        "session_id": session,
    }


def test_owner_with_a_queue_keeps_its_agent(tmp_path):
    """The agent's node has 100 s of other prompts; its idle twin could take over in a second."""
    rows = [row(0, "alice", 0, 16)]
    rows += [row(20, f"other-{n}", 1_000 * (n + 1), 96) for n in range(5)]
    rows.append(row(23, "alice", 0, 16, more=range(90_000, 90_008)))
    seconds, moved = run_of(tmp_path, rows, "seconds")
    before, stayed = run_of(tmp_path, rows, "owner-always")

    assert stayed.moves == stayed.relocated_share == 0
    assert before.machines["b"].turns_count == 0
    assert (moved.moves, seconds.machines["b"].turns_count) == (1, 1)


def test_stays_are_booked_with_no_work():
    run = workload_run("W1", "owner-always", sessions=8)
    ledger, booked = run.router.fleet.ledger, []
    begin = ledger.begin

    def record_and_begin(node, prefill_s, *, cold):
        booked.append(prefill_s)
        return begin(node, prefill_s, cold=cold)

    ledger.begin = record_and_begin
    outcome = run.play()

    assert len([each for each in booked if each > 0]) == 8, "one for each new agent"
    assert len(booked) == outcome.turns


def test_every_agent_computes_its_whole_beginning(tmp_path):
    run = SimulatedRun(TWINS, "owner-always", 1, arrivals_of(burst(tmp_path)))

    assert run.play().computed_tokens == AGENTS * (HEAD_TOKENS + OWN_TOKENS)

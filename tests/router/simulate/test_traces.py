"""Traces in Mooncake's format: read strictly, and played in the order of their waits."""

import json

import pytest

from fabric.errors import RejectedError
from router.simulate.run import SimulatedRun
from router.simulate.traces import arrivals_of, read_trace
from tests.router.simulate.small import THREE

MOONCAKE = {
    "timestamp": 27482,
    "input_length": 6955,
    "output_length": 52,
    "hash_ids": list(range(14)),
}


def trace(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


def row(blocks, out=10, **more):
    return {"input_length": 512 * len(blocks), "output_length": out, "hash_ids": blocks} | more


def played(rows, **more):
    """Play a trace; return agent and time of each turn, and the outcome."""
    run = SimulatedRun(THREE, "seconds", 1, arrivals_of(rows, **more))
    turns, ask = [], run.dispatcher.ask

    def note(turn):
        turns.append((turn.agent, round(run.timeline.now_s, 3), run.dispatcher.counters.answered))
        ask(turn)

    run.dispatcher.ask = note
    return turns, run.play()


def test_mooncake_rows_are_read_and_played(tmp_path):
    later = MOONCAKE | {"timestamp": 30535, "hash_ids": [0, 1, *range(50, 62)]}
    rows = read_trace(trace(tmp_path, MOONCAKE, "\n", later))
    turns, outcome = played(rows)

    assert [(agent, at_s) for agent, at_s, _ in turns] == [("row-1", 27.482), ("row-3", 30.535)]
    assert outcome.turns == 2
    assert [each.at_s for each in rows] == [27.482, 30.535]
    assert played(rows, speedup=2.0)[0][0][1] == 13.741


def test_rows_share_common_hash_ids(tmp_path):
    shared = list(range(8))
    longer = row([*shared, 90], timestamp=60_000)
    other = row([91, *shared], timestamp=120_000)
    _, outcome = played(read_trace(trace(tmp_path, row(shared, timestamp=0), longer, other)))

    # The second finds eight blocks; the third none, as its first differs.
    assert outcome.cached_share == pytest.approx(8 / (8 + 9 + 9), rel=0.01)


def test_session_is_one_agent_with_sequential_turns(tmp_path):
    first = row([1], session_id="s", timestamp=1_000)
    second = row([1, 2], session_id="s", delay=500, tool_wait_ms=250)
    turns, outcome = played(read_trace(trace(tmp_path, first, second)))

    assert [agent for agent, _, _ in turns] == ["s", "s"]
    assert turns[1][2] == 1  # after the first was answered
    assert turns[1][1] > 1.0 + 0.75
    assert outcome.relocated_share == 0.0


def test_join_waits_for_all_branches(tmp_path):
    rows = [
        row([1], id="root", session_id="s"),
        row([1, 2], id="left", session_id="s", branch=1, wait_for=["root"]),
        row([1, 3], out=400, id="right", session_id="s", branch=2, wait_for=["root"]),
        row([1, 4], id="join", session_id="s", wait_for=["left", "right"], delay=100),
    ]
    turns, outcome = played(read_trace(trace(tmp_path, *rows)))

    assert [(agent, answered) for agent, _, answered in turns] == [
        ("s", 0),
        ("s.1", 1),
        ("s.2", 1),
        ("s", 3),
    ]
    assert outcome.turns == 4


def test_continuing_row_computes_only_its_new_tokens(tmp_path):
    """The new row's blocks get new names, as the last block before it was not full."""
    first = {"input_length": 700, "output_length": 40, "hash_ids": [1, 2], "session_id": "s"}
    second = first | {"input_length": 900, "hash_ids": [1, 3], "timestamp": 60_000}
    known, recomputed = (
        played(read_trace(trace(tmp_path, first, second | more)))[1].computed_tokens
        for more in ({"continues": True}, {})
    )

    assert known == 700 + 900 - 740
    assert recomputed == 700 + 900 - 512


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("{}\n", "input_length must be a whole number of at least 1"),
        ("[]\n", "must be an object"),
        ("not json\n", "Expecting value"),
        (row([1, 2]) | {"input_length": 512}, "512 tokens are 1 hash_ids"),
        (row([-1]), "hash_ids must be whole numbers"),
        (row([1.5]), "hash_ids must be whole numbers"),
        (row([1]) | {"hash_ids": 3}, "hash_ids must be a list"),
        (row([1], delay="soon"), "delay must be milliseconds"),
        (row([1], timestamp=float("inf")), "timestamp must be milliseconds"),
        (row([1], continues=1), "continues must be true or false"),
        (row([1], colour="red"), "unknown field 'colour'"),
        (row([1], wait_for=["nowhere"]), "not an earlier row of the session"),
        (row([1], session_id="other", wait_for=["first"]), "not an earlier row of the session"),
        (row([1], id="first", session_id="s"), "occurs twice"),
        (row([1]) | {"output_length": True}, "output_length must be a whole number"),
    ],
)
def test_first_invalid_line_is_named(tmp_path, wrong, message):
    path = trace(tmp_path, row([1], id="first", session_id="s"), wrong)

    with pytest.raises(RejectedError) as refused:
        read_trace(path)
    assert f"{path}:2: " in refused.value.message
    assert message in refused.value.message


def test_overlong_line_is_rejected(tmp_path):
    with pytest.raises(RejectedError, match="at most"):
        read_trace(trace(tmp_path, " " * (1 << 21) + "{}\n"))


def test_empty_trace_is_rejected(tmp_path):
    with pytest.raises(RejectedError, match="no rows"):
        read_trace(trace(tmp_path, "\n"))

"""A node's own times of a turn, and the history of turns in an agent's record."""

import json
import logging

import pytest

from fabric.control.node_calls import AgentList, ListAgents
from fabric.control.turn_calls import ReadTurns, TurnsView
from fabric.errors import FabricError
from fabric.hosting.log_files import add_log_file
from fabric.ids import AgentId, NodeName, TurnId
from fabric.limits import TURN_HISTORY_MAX
from fabric.record.turn_history import TurnNote, append_turn, read_turns
from fabric.turn.generation import TurnTag, TurnTimes
from tests.support.services import TENANT, ask, call, migrate, running, start_service
from tests.support.tiny_models import LLAMA, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), LLAMA)


def turns_of(service, agent):
    return call(service, ReadTurns(TENANT, AgentId(agent)), TurnsView).turns


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


def test_record_keeps_each_turn_with_its_times(tmp_path, model):
    with running(tmp_path, model) as node:
        tag = TurnTag(TurnId("req_12345678"), began_s=1_789_000_000.5, queue_s=0.25, move_s=0.5)
        first = ask(node, chat("Tell me of the sea."), agent="mira", turn=tag, max_tokens=6)
        ask(node, chat("Tell me of the sea.", first.text, "And more?"), agent="mira", max_tokens=4)
        one, two = turns_of(node, "mira")
    assert (one.id, one.at_s, one.node) == ("req_12345678", 1_789_000_000.5, "node-a")
    assert (one.cache, one.match, one.cached_tokens) == ("cold", "none", 0)
    assert one.prompt_tokens == first.admitted.prompt_tokens
    assert one.completion_tokens == first.finished.completion_tokens
    assert one.outcome == first.finished.reason.value
    assert two.cache == "hot"
    assert two.cached_tokens > 0
    times = first.finished.times
    assert times.queue_s >= 0.25
    assert times.move_s == 0.5
    assert times.prefill_s > 0
    assert times.decode_s > 0
    assert times.first_token_s >= 0.75 + times.prefill_s
    # The time of the record's own write is not in the record.
    assert one.times.total_s <= times.total_s + 0.001


def test_lines_of_a_nodes_log_name_the_turn(tmp_path, model):
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    path = add_log_file(tmp_path / "node.a", "node-a", "json")
    try:
        with running(tmp_path, model) as node:
            tag = TurnTag(TurnId("req_12345678"), 1.0)
            ask(node, chat("Tell me of the sea."), agent="mira", turn=tag, max_tokens=6)
            ask(node, chat("Tell me of the woods."), agent="ivan", max_tokens=6)
    finally:
        for handler in [each for each in root.handlers if each not in before]:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(level)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    ends = [row for row in rows if row["logger"] == "node.turn.decoding"]
    (own,) = (row for row in ends if row["turn"] == "req_12345678")
    assert "0 of" in own["message"]
    assert len({row["turn"] for row in ends}) == 3, "the self-test's have an id, too"
    assert "sea" not in path.read_text()


def test_times_of_a_turn_add_up_to_its_duration(tmp_path, model):
    with running(tmp_path, model) as node:
        tag = TurnTag(TurnId("req_12345678"), 1.0)
        before_s = node.node.resources.clock.monotonic_s()
        reply = ask(node, chat("Tell me of the sea."), agent="mira", turn=tag, max_tokens=6)
        after_s = node.node.resources.clock.monotonic_s()
    assert 0 < reply.finished.times.total_s <= after_s - before_s


def test_router_of_an_earlier_version_gets_no_times(tmp_path, model):
    with running(tmp_path, model) as node:
        reply = ask(node, chat("Tell me of the sea."), agent="mira", max_tokens=3)
        assert reply.finished.times is None
        assert turns_of(node, "mira")[0].id.startswith("test-op-")


def last_match_of(service, agent):
    views = [sketch.view for sketch in call(service, ListAgents(), AgentList).agents]
    (found,) = [view.last_match for view in views if view.agent == agent]
    return found.kind, found.cached_tokens, found.prompt_tokens, found.reason


def test_history_outlives_restarts_and_moves(tmp_path, model):
    with running(tmp_path, model) as node:
        ask(node, chat("Tell me of the sea."), agent="mira", max_tokens=3)
    source = start_service(tmp_path, model)
    target = start_service(tmp_path, model, "node-b")
    try:
        kept = turns_of(source, "mira")
        assert [turn.node for turn in kept] == ["node-a"]
        match = last_match_of(source, "mira")
        assert match == ("none", 0, kept[0].prompt_tokens, kept[0].reason)
        epoch = source.node.resources.table.get((TENANT, AgentId("mira"))).manifest.epoch
        migrate(source, target, "mira", epoch)
        assert turns_of(target, "mira") == kept
        assert last_match_of(target, "mira") == match
        ask(target, chat("Of the woods, now."), agent="mira", max_tokens=3, epoch=epoch + 1)
        assert [turn.node for turn in turns_of(target, "mira")] == ["node-a", "node-b"]
        with pytest.raises(FabricError, match="replica"):
            turns_of(source, "mira")
    finally:
        source.stop()
        target.stop()


def note(number, reason="it differs there"):
    return TurnNote(
        TurnId(f"req_{number:08d}"), 1e9, NodeName("node-a"), "stop", "hot", "extend", reason,
        10, 9, 0, 3, TurnTimes(first_token_s=0.5),
    )  # fmt: skip


def test_history_is_bounded():
    turns = ""
    for number in range(TURN_HISTORY_MAX + 5):
        turns = append_turn(turns, note(number, "why " * 200))
    kept = read_turns(turns)
    assert [turn.id for turn in kept] == [
        f"req_{number:08d}" for number in range(5, TURN_HISTORY_MAX + 5)
    ]
    assert all(len(turn.reason) <= 200 for turn in kept)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[1,", "[2,"),
        ('"req_00000001"', '"req 1"'),
        ('"req_00000001"', "7"),
        ("10,9", "10,-9"),
        ("10,9", "10,9.5"),
        ("0.5]", "NaN]"),
        ("0.5]", '"0.5"]'),
        ('"hot"', "null"),
        ("]]", "]"),
    ],
)
def test_lines_of_other_versions_are_skipped(old, new):
    turns = append_turn("", note(1))
    assert old in turns
    both = append_turn(turns.replace(old, new), note(2))
    assert [turn.id for turn in read_turns(both)] == ["req_00000002"]


def test_further_items_of_a_line_are_ignored():
    turns = append_turn("", note(1))
    later = f'{turns[:-1]},"of a later version"]'
    assert read_turns(later) == read_turns(turns) != ()

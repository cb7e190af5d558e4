"""Invariants of every policy on any conversation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.codec import dump_json, from_plain, parse_json
from fabric.turn.messages import Message
from router.policies.clear_tool_uses import Clearing
from router.policies.drop_failed_tool_calls import DropFailedToolCalls
from router.policies.editing import checked, edited_count
from router.policies.exchanges import unpaired
from router.policies.registry import BUILT_IN, KeepAll
from router.policies.strip_thinking import StripThinking
from router.policies.summarize_to_stub import SummarizeToStub
from router.policies.truncate_older_than import TruncateOlderThan
from router.policies.truncation import oldest_first, without_oldest
from tests.router.policies.strategies import TURN, conversations

SMALL = st.integers(1, 4)
POLICIES = st.one_of(
    st.builds(KeepAll),
    st.builds(TruncateOlderThan, n=SMALL, max_chars=st.integers(100, 200), every=SMALL),
    st.builds(DropFailedToolCalls),
    st.builds(StripThinking, keep=st.integers(0, 3)),
    st.builds(SummarizeToStub, turns=SMALL, steps=SMALL, every=SMALL),
)


def test_each_that_comes_with_the_router_is_tried():
    tried = {type(policy) for policy in (KeepAll(), TruncateOlderThan(), DropFailedToolCalls())}
    assert tried | {StripThinking, SummarizeToStub} == set(BUILT_IN.values())


@given(conversations(), st.lists(POLICIES, min_size=1, max_size=4))
def test_several_in_a_row_leave_a_conversation_that_may_be_sent(said, policies):
    before = list(said)
    for policy in policies:
        after = policy.transform(before, TURN)
        assert checked(before, after) == tuple(after)
        assert not unpaired(after) - unpaired(before)
        before = after
    plain = parse_json(dump_json(list(before)))
    assert from_plain(list[Message], plain) == list(before)


@given(conversations(), POLICIES)
def test_what_was_edited_is_edited_no_further(said, policy):
    once = policy.transform(said, TURN)
    assert list(policy.transform(once, TURN)) == list(once)


@given(conversations(), POLICIES)
def test_a_conversation_is_not_written_to_and_edited_alike_each_time(said, policy):
    copy = from_plain(list[Message], parse_json(dump_json(said)))
    once = policy.transform(said, TURN)
    assert said == copy
    assert list(policy.transform(copy, TURN)) == list(once)


@given(conversations(), POLICIES)
def test_no_more_is_said_to_be_edited_than_came(said, policy):
    after = policy.transform(said, TURN)
    count = edited_count(said, after)
    assert 0 <= count <= len(said)
    assert (count > 0) or len(after) == len(said)


@given(
    conversations(), st.integers(0, 4), st.sets(st.sampled_from(["bash", "read"])), st.booleans()
)
def test_clearing_keeps_every_rule_of_policies(said, keep, exclude, inputs):
    clearing = Clearing(keep, exclude, inputs)
    after = clearing.clear(said, clearing.of(said))
    assert checked(said, after) == tuple(after)
    assert clearing.of(after) == []
    assert len(after) == len(said)


@given(conversations(), st.data())
def test_dropping_the_oldest_keeps_every_rule_of_policies(said, data):
    units = oldest_first(said)
    assert [unit.start for unit in units] == sorted({unit.start for unit in units})
    count = data.draw(st.integers(0, len(units)))
    after = without_oldest(said, units[:count])
    assert checked(said, after) == tuple(after)


@pytest.mark.parametrize("name", BUILT_IN)
def test_names_are_those_of_the_classes(name):
    assert BUILT_IN[name].__name__ == "".join(part.title() for part in name.split("_"))

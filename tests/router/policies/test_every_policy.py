"""Invariants of every policy on any conversation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.codec import dump_json, from_plain, parse_json
from fabric.turn.messages import Message
from router.policies.clear_tool_uses import Clearing
from router.policies.drop_failed_tool_calls import DropFailedToolCalls
from router.policies.editing import check_result, edited_count
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


def test_every_built_in_policy_is_covered():
    tried = {type(policy) for policy in (KeepAll(), TruncateOlderThan(), DropFailedToolCalls())}
    assert tried | {StripThinking, SummarizeToStub} == set(BUILT_IN.values())


@given(conversations(), st.lists(POLICIES, min_size=1, max_size=4))
def test_chained_policies_leave_a_valid_conversation(messages, policies):
    before = list(messages)
    for policy in policies:
        after = policy.transform(before, TURN)
        assert check_result(before, after) == tuple(after)
        assert not unpaired(after) - unpaired(before)
        before = after
    plain = parse_json(dump_json(list(before)))
    assert from_plain(list[Message], plain) == list(before)


@given(conversations(), POLICIES)
def test_policies_are_idempotent(messages, policy):
    once = policy.transform(messages, TURN)
    assert list(policy.transform(once, TURN)) == list(once)


@given(conversations(), POLICIES)
def test_policies_are_pure_and_deterministic(messages, policy):
    copy = from_plain(list[Message], parse_json(dump_json(messages)))
    once = policy.transform(messages, TURN)
    assert messages == copy
    assert list(policy.transform(copy, TURN)) == list(once)


@given(conversations(), POLICIES)
def test_edited_count_is_bounded_by_message_count(messages, policy):
    after = policy.transform(messages, TURN)
    count = edited_count(messages, after)
    assert 0 <= count <= len(messages)
    assert (count > 0) or len(after) == len(messages)


@given(
    conversations(), st.integers(0, 4), st.sets(st.sampled_from(["bash", "read"])), st.booleans()
)
def test_clearing_satisfies_policy_invariants(messages, keep, exclude, inputs):
    clearing = Clearing(keep, exclude, inputs)
    after = clearing.clear(messages, clearing.of(messages))
    assert check_result(messages, after) == tuple(after)
    assert clearing.of(after) == []
    assert len(after) == len(messages)


@given(conversations(), st.data())
def test_dropping_oldest_turns_satisfies_policy_invariants(messages, data):
    units = oldest_first(messages)
    assert [unit.start for unit in units] == sorted({unit.start for unit in units})
    count = data.draw(st.integers(0, len(units)))
    after = without_oldest(messages, units[:count])
    assert check_result(messages, after) == tuple(after)


@pytest.mark.parametrize("name", BUILT_IN)
def test_policy_names_match_class_names(name):
    assert BUILT_IN[name].__name__ == "".join(part.title() for part in name.split("_"))

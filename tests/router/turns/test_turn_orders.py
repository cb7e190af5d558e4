"""The learnt order of turns: expectations, their expiry, and bounds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.ids import AgentId, TenantId
from router.limits import TURN_ORDER_AGENTS_MAX, TURN_ORDERS_MAX
from router.turns.expected_turns import TurnOrders

GROUP = TenantId("default"), "crew"
NAMES = [AgentId(name) for name in "abcde"]


def play_agents(orders, agents, group=GROUP):
    """Note turns and guess each next agent; return the expectations and their outcomes."""
    expected, outcomes = [], []
    for agent in agents:
        outcomes.append(orders.note(group, AgentId(agent)))
        expected.append(orders.expect(group, AgentId(agent)))
        if expected[-1] is not None:
            orders.note_guess(group, expected[-1])
    return expected, outcomes


def test_a_round_is_expected_once_it_was_seen_twice():
    expected, outcomes = play_agents(TurnOrders(), "abcde" * 4)

    assert expected[:10] == [None] * 10, "the step from e to a was seen once"
    assert expected[10:] == list("bcdea" * 2)
    assert outcomes[11:] == [True] * 9


@given(st.permutations(NAMES), st.integers(2, 5), st.integers(3, 6))
def test_agents_that_take_turns_are_expected(names, count, laps):
    lap = names[:count]
    expected, outcomes = play_agents(TurnOrders(), lap * laps)
    following = [*(lap * laps)[1:], lap[0]]

    assert expected[2 * count :] == following[2 * count :]
    assert False not in outcomes


@given(st.lists(st.sampled_from(NAMES), max_size=60))
def test_only_agents_that_followed_twice_in_a_row_are_expected(agents):
    orders = TurnOrders()
    play_agents(orders, reversed(NAMES))  # so that no agent is new
    before, followers = NAMES[0], {later: (name, 1) for name, later in pairwise(NAMES)}
    for agent in agents:
        orders.note(GROUP, agent)
        if before not in (None, agent):
            name, seen_count = followers.get(before, (None, 0))
            followers[before] = (agent, seen_count + 1 if name == agent else 1)
        before = agent
        name, seen_count = followers.get(agent, (None, 0))
        assert orders.expect(GROUP, agent) == (name if seen_count >= 2 else None)


def test_tool_loops_are_one_turn_and_a_child_comes_back_to_its_parent():
    expected, outcomes = play_agents(TurnOrders(), "aaabbaabbbabb")

    assert expected[-1] == "a"
    assert False not in outcomes


def test_a_parent_is_expected_after_new_children_once_it_came_back_twice():
    expected, outcomes = play_agents(
        TurnOrders(), ["main", "s1", "main", "s2", "main", "s3", "main"]
    )

    assert expected == [None] * 5 + ["main", None]
    assert outcomes == [None] * 6 + [True]


@pytest.mark.parametrize(
    "turns",
    [
        ["main", "s1", "main", "s2", "s3"],  # two children at once
        ["main", "s1", "main", "s2", "main", "s3", "other", "main", "s4"],  # main did not come back
        ["main", "s1", "main", "s2", "main", "other", "s3"],  # a child of another parent
        ["s1", "main", "s2", "main", "s2", "main", "s2", "main", "s3"],  # of an old child, and once
    ],
)
def test_no_parent_is_expected_that_may_not_come_back(turns):
    expected, _ = play_agents(TurnOrders(), turns)
    assert expected[-1] is None


def test_a_wrong_guess_is_known_and_ends_the_expectation():
    orders = TurnOrders()
    play_agents(orders, "abcabcabc")
    expected, outcomes = play_agents(orders, "ac")
    assert (expected[0], outcomes[1]) == ("b", False)
    orders.note(GROUP, AgentId("a"))
    assert orders.expect(GROUP, AgentId("a")) is None


def test_groups_and_tenants_are_apart():
    orders = TurnOrders()
    play_agents(orders, "ababab")
    for group in ((GROUP[0], "other"), (TenantId("other"), GROUP[1])):
        assert orders.note(group, AgentId("a")) is None
        assert orders.expect(group, AgentId("a")) is None
    assert orders.expect(GROUP, AgentId("b")) == "a"


@pytest.mark.parametrize("count", [TURN_ORDERS_MAX + 10])
def test_the_oldest_group_and_agent_are_forgotten(count):
    orders = TurnOrders()
    play_agents(orders, "ababab")
    for number in range(count):
        orders.note((GROUP[0], f"group-{number}"), AgentId("a"))
    assert orders.expect(GROUP, AgentId("b")) is None

    play_agents(orders, "ababab")
    play_agents(orders, [f"agent-{number}" for number in range(TURN_ORDER_AGENTS_MAX + 2)])
    assert play_agents(orders, "a")[0] == [None]

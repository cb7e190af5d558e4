"""Positions at which a recurrent model's states are kept for its next prompt."""

import pytest

from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS, STATE_EVERY_TOKENS, STATES_PER_AGENT_MAX
from fabric.record.manifest import Placed
from fabric.record.state_points import STATES_NEWEST, kept_states, state_points
from fabric.turn.prompt_plan import NO_MARKS, PromptMarks
from tests.support.blocks import make_block


def test_states_are_stored_where_later_prompts_may_diverge():
    marks = PromptMarks(head=300, question=400, conversation=900, opens_more=True)
    assert state_points(905, marks, 0) == (BLOCK_TOKENS, 300, 400, 900, 904)


def test_repeated_answer_opening_gets_no_state():
    """The next prompt repeats the answer's role name, but not the opening of a thought."""
    assert state_points(905, PromptMarks(conversation=900), 0) == (904,)
    assert state_points(905, PromptMarks(conversation=900, opens_more=True), 0) == (900, 904)


def test_state_points_on_grid_are_block_boundaries():
    """Reuse limited to whole blocks needs states at block boundaries."""
    marks = PromptMarks(head=300, question=700, conversation=900, opens_more=True)
    points = state_points(1_100, marks, 0, on_grid=True)
    assert points == (256, 512, 768, 1_024)


def test_state_points_before_the_reused_prefix_are_omitted():
    """Only points that the prefill will still pass are listed."""
    marks = PromptMarks(head=300, question=400, conversation=900, opens_more=True)
    assert state_points(905, marks, 400) == (900, 904)
    assert state_points(905, marks, 904) == ()


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_prompts_without_messages_store_final_state_only(count):
    assert state_points(count, NO_MARKS, 0) == ((count - 1,) if count > 1 else ())


def test_long_prompts_store_intermediate_states():
    """The distance of state points bounds the recomputed tokens after an edit in the middle."""
    count = 2 * STATE_EVERY_TOKENS + 2
    points = (STATE_EVERY_TOKENS, 2 * STATE_EVERY_TOKENS, 2 * STATE_EVERY_TOKENS + 1)
    assert state_points(count, NO_MARKS, 0) == points


def placed_states(*ends):
    block = make_block(1, 3, group=CacheGroup.STATE).ref
    return [Placed(block, end) for end in ends]


def test_branches_store_states_unless_one_lies_just_before():
    marks = PromptMarks(head=300).with_branch(320).with_branch(310).with_branch(400)
    assert state_points(905, marks.with_branch(2_000), 0) == (BLOCK_TOKENS, 300, 320, 400, 904)
    assert state_points(905, marks, 390) == (904,)
    assert state_points(905, marks, 0, on_grid=True) == (BLOCK_TOKENS, 768)


def test_newest_states_and_marked_states_are_kept():
    """After fourteen tool calls, the next prompt may continue behind the last question."""
    ends = [256, 300, 400, *range(500, 1_500, 50)]
    marks = PromptMarks(head=300, question=390, conversation=1_440)
    kept = [state.end for state in kept_states(placed_states(*ends), marks)]

    assert len(kept) == STATES_PER_AGENT_MAX
    assert kept[:3] == [256, 300, 400]
    assert kept[-STATES_NEWEST:] == ends[-STATES_NEWEST:]


def test_other_states_are_kept_by_tokens_saved():
    """Two adjacent states save little more than one, and early ones are seldom reused."""
    ends = [2_000, 2_010, 4_000, 6_000, 6_005, 7_000, 7_100, 8_000, 8_100, 8_200, 8_205]
    assert [state.end for state in kept_states(placed_states(*ends))] == [
        *(4_000, 6_000, 7_000),
        *ends[-STATES_NEWEST - 1 :],  # the end of an answer's text, and the turn's end
    ]


def test_first_block_state_is_kept_without_marks():
    ends = [10, 256, *range(500, 1_500, 50)]
    assert 256 in [state.end for state in kept_states(placed_states(*ends))]


def test_few_states_are_all_kept():
    few = placed_states(5, 10)
    assert kept_states(few, PromptMarks(head=1_000, question=9)) == tuple(few)

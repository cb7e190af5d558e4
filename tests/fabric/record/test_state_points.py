"""Where a recurrent model's states are kept, so that its next prompt finds one."""

import pytest

from fabric.kvcache.cache_spec import CacheGroup
from fabric.limits import BLOCK_TOKENS, STATE_EVERY_TOKENS, STATES_PER_AGENT_MAX
from fabric.record.manifest import Placed
from fabric.record.state_points import STATES_NEWEST, kept_states, state_points
from fabric.turn.prompt_plan import NO_MARKS, PromptMarks
from tests.support.blocks import make_block


def test_states_are_kept_wherever_later_prompts_go_other_ways():
    marks = PromptMarks(head=300, asked=400, conversation=900, opens_more=True)
    assert state_points(905, marks, 0) == (BLOCK_TOKENS, 300, 400, 900, 904)


def test_an_opening_that_comes_back_as_it_is_gets_no_state_of_its_own():
    """A name is repeated before the answer; a thought that is opened is not."""
    assert state_points(905, PromptMarks(conversation=900), 0) == (904,)
    assert state_points(905, PromptMarks(conversation=900, opens_more=True), 0) == (900, 904)


def test_on_a_grid_all_points_are_block_boundaries():
    """Where reuse is cut down to blocks, no other state serves."""
    marks = PromptMarks(head=300, asked=700, conversation=900, opens_more=True)
    points = state_points(1_100, marks, 0, on_grid=True)
    assert points == (256, 512, 768, 1_024)


def test_what_is_done_needs_no_state_again():
    """Only points that the prompt still comes by are listed."""
    marks = PromptMarks(head=300, asked=400, conversation=900, opens_more=True)
    assert state_points(905, marks, 400) == (900, 904)
    assert state_points(905, marks, 904) == ()


@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_prompts_without_messages_have_their_end_only(count):
    assert state_points(count, NO_MARKS, 0) == ((count - 1,) if count > 1 else ())


def test_long_prompts_have_states_on_the_way():
    """An edit in the middle costs so many tokens at most."""
    count = 2 * STATE_EVERY_TOKENS + 2
    points = (STATE_EVERY_TOKENS, 2 * STATE_EVERY_TOKENS, 2 * STATE_EVERY_TOKENS + 1)
    assert state_points(count, NO_MARKS, 0) == points


def placed(*ends):
    block = make_block(1, 3, group=CacheGroup.STATE).ref
    return [Placed(block, end) for end in ends]


def test_branches_have_states_unless_one_lies_right_before_them():
    marks = PromptMarks(head=300).with_branch(320).with_branch(310).with_branch(400)
    assert state_points(905, marks.with_branch(2_000), 0) == (BLOCK_TOKENS, 300, 320, 400, 904)
    assert state_points(905, marks, 390) == (904,)
    assert state_points(905, marks, 0, on_grid=True) == (BLOCK_TOKENS, 768)


def test_the_newest_states_stay_with_those_that_are_come_back_to():
    """Fourteen calls of a tool later, the next question may begin behind the last one."""
    ends = [256, 300, 400, *range(500, 1_500, 50)]
    marks = PromptMarks(head=300, asked=390, conversation=1_440)
    kept = [state.end for state in kept_states(placed(*ends), marks)]

    assert len(kept) == STATES_PER_AGENT_MAX
    assert kept[:3] == [256, 300, 400]
    assert kept[-STATES_NEWEST:] == ends[-STATES_NEWEST:]


def test_of_the_others_those_stay_that_spare_most():
    """Two beside each other spare little more than one, and early ones are seldom come back to."""
    ends = [2_000, 2_010, 4_000, 6_000, 6_005, 7_000, 7_100, 8_000, 8_100, 8_200, 8_205]
    assert [state.end for state in kept_states(placed(*ends))] == [
        *(4_000, 6_000, 7_000),
        *ends[-STATES_NEWEST - 1 :],  # where an answer's text ends, and right behind it the turn
    ]


def test_without_marks_the_first_that_others_find_stays():
    ends = [10, 256, *range(500, 1_500, 50)]
    assert 256 in [state.end for state in kept_states(placed(*ends))]


def test_few_states_all_stay():
    few = placed(5, 10)
    assert kept_states(few, PromptMarks(head=1_000, asked=9)) == tuple(few)

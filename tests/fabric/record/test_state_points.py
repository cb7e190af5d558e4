"""Where a recurrent model's states are kept, so that its next prompt finds one."""

import pytest

from fabric.limits import BLOCK_TOKENS, STATE_EVERY_TOKENS
from fabric.record.state_points import state_points

START, END, THINK = 1, 2, 3
SPECIAL = {START, END, THINK}
SYSTEM = [START, *[10] * 300, END, 11]
USER = [START, *[12] * 20, END, 11]
ANSWER = [START, 13, 11]  # where the template has the answer begin


def test_an_answer_that_the_template_begins_gets_a_state_before_its_beginning() -> None:
    """A thought that is opened for the model is gone when its answer comes back."""
    plain = [*SYSTEM, *USER, *ANSWER]
    opened = [*plain, THINK, 11]
    start = len(plain) - len(ANSWER)

    assert state_points(plain, SPECIAL, 0) == (BLOCK_TOKENS, len(plain) - 1)
    assert state_points(opened, SPECIAL, 0) == (BLOCK_TOKENS, start, len(opened) - 1)


def test_on_a_grid_all_points_are_block_boundaries() -> None:
    """Where reuse is cut down to blocks, no other state serves."""
    ids = [*SYSTEM, *USER * 20, *ANSWER, THINK, 11]
    points = state_points(ids, SPECIAL, 0, on_grid=True)
    assert points
    assert all(point % BLOCK_TOKENS == 0 for point in points)


def test_what_is_done_needs_no_state_again() -> None:
    """Only points that the prompt still comes by are listed."""
    ids = [*SYSTEM, *USER, *ANSWER, THINK, 11]
    assert state_points(ids, SPECIAL, len(ids) - 3) == (len(ids) - 1,)
    assert state_points(ids, SPECIAL, len(ids) - 1) == ()


@pytest.mark.parametrize("ids", [[], [5], [START], [START, 5, 6], [5] * 300])
def test_prompts_without_messages_have_their_end_only(ids: list[int]) -> None:
    """Nothing repeats, so nothing marks a message."""
    assert state_points(ids, SPECIAL, 0) == ((len(ids) - 1,) if len(ids) > 1 else ())


def test_long_prompts_have_states_on_the_way() -> None:
    """An edit in the middle costs so many tokens at most."""
    ids = [5] * (2 * STATE_EVERY_TOKENS + 2)
    points = (STATE_EVERY_TOKENS, 2 * STATE_EVERY_TOKENS, 2 * STATE_EVERY_TOKENS + 1)
    assert state_points(ids, SPECIAL, 0) == points

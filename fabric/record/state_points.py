"""State points: tokens whose recurrent state is worth keeping, and which states stay.

A recurrent state cannot be cut, so a context can be resumed only at a token where a state was
kept:

- at the end of a prompt and of a turn
- at the end of an answer's text, since clients often drop the white space after it
- where the template opens the answer, since later prompts may lack an opened thought
- after the system prompt, which other conversations share
- where prompts may diverge: before the last question and before the system prompt's date
- every STATE_EVERY_TOKENS tokens in between

States that other agents may find are at block boundaries, whose names depend on the tokens only.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from fabric.limits import (
    BLOCK_TOKENS,
    STATE_EVERY_TOKENS,
    STATE_GAP_TOKENS_MIN,
    STATES_PER_AGENT_MAX,
)
from fabric.record.manifest import Placed
from fabric.turn.prompt_plan import NO_MARKS, PromptMarks

STATES_NEWEST: Final = 4  # before the question, before its answer, ends of prompt and turn


def state_points(
    tokens_count: int, marks: PromptMarks, done: int, *, on_grid: bool = False
) -> tuple[int, ...]:
    """List the token counts in `done` … `tokens_count - 1` at which to keep a prompt's state.

    `on_grid`: return block boundaries only, because only those will be reused.
    """
    last = tokens_count - 1  # the prompt's last token is decoded, not prefilled
    opening = marks.conversation if marks.opens_more else 0
    points = {*range(STATE_EVERY_TOKENS, last, STATE_EVERY_TOKENS), _floor(marks.head)}
    for point in (marks.head, marks.question, opening, last):
        points.add(_floor(point) if on_grid else point)
    points = {point for point in points if done < point <= last}
    for branch in sorted(marks.branches):
        point = _floor(branch) if on_grid else branch
        nearest = max((known for known in (done, *points) if known <= point), default=last)
        if nearest + STATE_GAP_TOKENS_MIN <= point <= last:
            points.add(point)
    return tuple(sorted(points))


def kept_states(states: Sequence[Placed], marks: PromptMarks = NO_MARKS) -> tuple[Placed, ...]:
    """Choose which of an agent's states to keep: the newest, and those likely to be resumed.

    Likely ones are at the end of the head that other agents share, and after the last question,
    because the next prompt may drop the thoughts from every answer since. A state right before the
    last one is the end of an answer's text. Of the others, drops those that cost the fewest
    recomputed tokens; early ones first, because clients change the end of a conversation.
    """
    on_grid = [state for state in states if state.end % BLOCK_TOKENS == 0]
    shared = next((state for state in on_grid if state.end == _floor(marks.head)), None)
    likely = [shared or next(iter(on_grid), None), _first_after(states, marks.head)]
    is_trimmed = len(states) > 1 and states[-1].end - states[-2].end < STATE_GAP_TOKENS_MIN
    likely += [_first_after(states, marks.question), *states[-STATES_NEWEST - is_trimmed :]]
    fixed = {state.end for state in likely if state is not None}
    kept = list(states)
    while len(kept) > STATES_PER_AGENT_MAX:
        last = kept[-1].end
        ends = [0, *(state.end for state in kept)]
        costs = [
            (end - before) / (last - end + BLOCK_TOKENS) if end not in fixed else math.inf
            for before, end in pairwise(ends)
        ]
        del kept[costs.index(min(costs))]
    return tuple(kept)


def _first_after(states: Sequence[Placed], mark: int) -> Placed | None:
    return next((state for state in states if state.end >= mark), None) if mark else None


def _floor(tokens_count: int) -> int:
    return tokens_count // BLOCK_TOKENS * BLOCK_TOKENS

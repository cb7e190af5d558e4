"""Where a recurrent model's state is worth keeping, and which of an agent's states stay.

A state cannot be cut, so a context can be taken up again only where one was kept: at the end
of a prompt and of a turn, where the answer is opened (a thought that is opened for the model is
gone when its answer comes back), behind the system prompt, which other conversations share, and
now and then on the way. States that others may find lie on block boundaries, whose names follow
from the tokens alone.
"""

from collections.abc import Sequence

from fabric.limits import BLOCK_TOKENS, STATE_EVERY_TOKENS, STATES_PER_AGENT_MAX
from fabric.record.manifest import Placed
from fabric.turn.prompt_marks import NO_MARKS, PromptMarks


def state_points(
    tokens_count: int, marks: PromptMarks, done: int, *, on_grid: bool = False
) -> tuple[int, ...]:
    """List the token counts in `done` … `tokens_count - 1` at which to keep a prompt's state.

    `on_grid` asks for block boundaries only: where reuse is cut down to them, no other serves.
    """
    last = tokens_count - 1  # the prompt's last token is decoded, not prefilled
    opening = marks.conversation if marks.opens_more else 0
    points = {*range(STATE_EVERY_TOKENS, last, STATE_EVERY_TOKENS), _floor(marks.head)}
    for point in (marks.head, marks.asked, opening, last):
        points.add(_floor(point) if on_grid else point)
    return tuple(sorted(point for point in points if done < point <= last))


def kept_states(states: Sequence[Placed], marks: PromptMarks = NO_MARKS) -> tuple[Placed, ...]:
    """Choose which of an agent's states to keep: the newest, and those that are come back to.

    These are at the head that others share, and behind the last question: the next one may take
    the thoughts out of every answer since.
    """
    if len(states) <= STATES_PER_AGENT_MAX:
        return tuple(states)
    on_grid = [state for state in states if state.end % BLOCK_TOKENS == 0]
    shared = next((state for state in on_grid if state.end == _floor(marks.head)), None)
    wanted = [shared or next(iter(on_grid), None), _behind(states, marks.head)]
    wanted.append(_behind(states, marks.asked))
    kept = {state.end: state for state in wanted if state is not None}
    for state in reversed(states):
        if len(kept) == STATES_PER_AGENT_MAX:
            break
        kept.setdefault(state.end, state)
    return tuple(kept[end] for end in sorted(kept))


def _behind(states: Sequence[Placed], mark: int) -> Placed | None:
    return next((state for state in states if state.end >= mark), None) if mark else None


def _floor(tokens_count: int) -> int:
    return tokens_count // BLOCK_TOKENS * BLOCK_TOKENS

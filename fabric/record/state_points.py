"""Where a recurrent model's state is worth keeping, and which of an agent's states stay.

A state cannot be cut, so a context can be taken up again only where one was kept: at the end
of a prompt and of a turn, behind the system prompt, which other conversations share, and now
and then on the way. States that others may find lie on block boundaries, whose names follow
from the tokens alone.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from fabric.limits import BLOCK_TOKENS, STATE_EVERY_TOKENS, STATES_PER_AGENT_MAX
from fabric.record.manifest import Placed


def state_points(
    ids: Sequence[int], special_ids: AbstractSet[int], done: int, *, on_grid: bool = False
) -> tuple[int, ...]:
    """List the token counts in `done` … `len(ids) - 1` at which to keep a prompt's state.

    `on_grid` asks for block boundaries only: where reuse is cut down to them, no other serves.
    """
    last = len(ids) - 1  # the prompt's last token is decoded, not prefilled
    points = set(range(STATE_EVERY_TOKENS, last, STATE_EVERY_TOKENS))
    starts = _message_starts(ids, special_ids)
    if starts:
        points.add(starts[1] // BLOCK_TOKENS * BLOCK_TOKENS)
        # An answer that the template has begun (by opening a thought, say) may come back without
        # that beginning.
        if any(token in special_ids for token in ids[starts[-1] + 1 :]):
            points.add(starts[-1] // BLOCK_TOKENS * BLOCK_TOKENS if on_grid else starts[-1])
    points.add(last // BLOCK_TOKENS * BLOCK_TOKENS if on_grid else last)
    return tuple(sorted(point for point in points if done < point <= last))


def _message_starts(ids: Sequence[int], special_ids: AbstractSet[int]) -> list[int]:
    """List where the first special token that comes again stands: twice or more, or nowhere."""
    at: dict[int, list[int]] = {}
    first: list[int] = []
    for index, token in enumerate(ids):
        if token in special_ids:
            places = at.setdefault(token, [])
            places.append(index)
            if len(places) > 1 and not first:
                first = places
    return first


def kept_states(states: Sequence[Placed]) -> tuple[Placed, ...]:
    """Choose which of an agent's states to keep: the newest, and the first that others share."""
    if len(states) <= STATES_PER_AGENT_MAX:
        return tuple(states)
    newest = list(states[-STATES_PER_AGENT_MAX:])
    shareable = next((state for state in states if state.end % BLOCK_TOKENS == 0), None)
    if shareable is not None and shareable not in newest:
        newest[0] = shareable
    return tuple(newest)

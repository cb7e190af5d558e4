"""Where a recurrent model's state is worth keeping, and which of an agent's states stay.

A state cannot be cut, so a context can be taken up again only where one was kept: at the end
of a prompt and of a turn, behind the system prompt, which other conversations share, and now
and then on the way. States that others may find lie on block boundaries, whose names follow
from the tokens alone.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from fabric.limits import BLOCK_TOKENS, STATE_EVERY_TOKENS, STATES_PER_AGENT_MAX
from fabric.manifest import Placed


def state_points(
    ids: Sequence[int], special_ids: AbstractSet[int], done: int, *, on_grid: bool = False
) -> tuple[int, ...]:
    """List the token counts in `done` … `len(ids) - 1` at which to keep a prompt's state.

    `on_grid` asks for block boundaries only: where reuse is cut down to them, no other serves.
    """
    last = len(ids) - 1  # the prompt's last token is decoded, not prefilled
    points = set(range(STATE_EVERY_TOKENS, last, STATE_EVERY_TOKENS))
    points.add(_first_message_end(ids, special_ids) // BLOCK_TOKENS * BLOCK_TOKENS)
    points.add(last // BLOCK_TOKENS * BLOCK_TOKENS if on_grid else last)
    return tuple(sorted(point for point in points if done < point <= last))


def _first_message_end(ids: Sequence[int], special_ids: AbstractSet[int]) -> int:
    """Return where the token that starts the first message comes again, or 0."""
    seen: set[int] = set()
    for at, token in enumerate(ids):
        if token in special_ids:
            if token in seen:
                return at
            seen.add(token)
    return 0


def kept_states(states: Sequence[Placed]) -> tuple[Placed, ...]:
    """Choose which of an agent's states to keep: the newest, and the first that others share."""
    if len(states) <= STATES_PER_AGENT_MAX:
        return tuple(states)
    newest = list(states[-STATES_PER_AGENT_MAX:])
    shareable = next((state for state in states if state.end % BLOCK_TOKENS == 0), None)
    if shareable is not None and shareable not in newest:
        newest[0] = shareable
    return tuple(newest)

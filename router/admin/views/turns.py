"""JSON views of turns: their times, and what is kept of them."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Final

from fabric.record.turn_history import TurnNote
from fabric.turn.generation import CacheTier, TurnTimes
from router.admin.views.shape import AnswerShape, Row

TURN: Final = AnswerShape(
    TurnNote, "agent.turn", "id", "at_s", "node", "outcome", "cache", "match", "reason",
    "prompt_tokens", "cached_tokens", "fetched_tokens", "completion_tokens", "times",
    beside={"not_hot": str | None},
)  # fmt: skip
_DIGITS: Final = 4


def turn_rows(notes: Sequence[TurnNote]) -> list[Row]:
    """Show the turns of an agent's history, given and listed with the newest first."""
    pairs = zip_longest(notes, notes[1:])
    return [TURN.row(note, not_hot=not_hot_reason(note, before)) for note, before in pairs]


def not_hot_reason(note: TurnNote, before: TurnNote | None) -> str | None:
    """Return why a turn's cache was not in its node's memory; None if it was."""
    if note.cache == CacheTier.HOT:
        return None
    if note.cache == CacheTier.PEER and note.fetched_tokens:
        return "another node sent its beginning"
    if before is not None and before.node != note.node:
        return f"it had moved here from {before.node}"
    if note.cache == CacheTier.DISK:
        return (
            "its cache had been evicted from memory"
            if before
            else "only tokens of other agents matched"
        )
    if note.cache == CacheTier.PEER:
        return "it came from another node"
    return "nothing of it was stored" if before is None else "nothing that was stored matched"


def times_row(times: TurnTimes | None) -> dict[str, float | None] | None:
    """Return a turn's times for an API; None if they are not known."""
    if times is None:
        return None
    rounded = asdict(times).items()
    return {name: None if value is None else round(value, _DIGITS) for name, value in rounded}

"""History of an agent's turns in its record: numbers and reasons, never text of a prompt.

One line of JSON for each turn, the oldest first: an array that begins with the version of its
items. Readers skip lines of unknown versions and ignore further items.
"""

import json
from dataclasses import dataclass, fields
from typing import Any, Final

from fabric.errors import RejectedError
from fabric.ids import NodeName, TurnId, parse_node_name, parse_turn_id
from fabric.limits import (
    TURN_HISTORY_MAX,
    TURN_LINE_CHARS_MAX,
    TURN_REASON_CHARS_MAX,
    TURNS_CHARS_MAX,
)
from fabric.shown_text import escape_line
from fabric.turn.generation import TurnTimes

VERSION: Final = 1
_TIMES: Final = tuple(field.name for field in fields(TurnTimes))
_ROUND_DIGITS: Final = 4
_SECONDS_MAX: Final = 1e10  # a wall-clock time, too
_COUNT_MAX: Final = 1 << 53


@dataclass(frozen=True, slots=True)
class TurnNote:
    """Entry of one turn."""

    id: TurnId
    at_s: float  # wall clock, of its request
    node: NodeName
    outcome: str  # a FinishReason, `cancelled`, or `moved`: another node continued it
    cache: str  # tier of the reused tokens
    match: str
    reason: str  # where and why the match ended
    prompt_tokens: int
    cached_tokens: int
    fetched_tokens: int  # cached tokens that another node sent meanwhile
    completion_tokens: int
    times: TurnTimes


def append_turn(turns: str, note: TurnNote) -> str:
    """Return a history with one more turn; drop the oldest of too many."""
    lines = turns.split("\n") if turns else []
    return "\n".join([*lines[max(0, len(lines) - TURN_HISTORY_MAX + 1) :], _line(note)])


def read_turns(turns: str) -> tuple[TurnNote, ...]:
    """Return the turns of a history that this version can read, the oldest first."""
    if len(turns) > TURNS_CHARS_MAX:
        return ()
    notes = (_note(line) for line in turns.split("\n")[-TURN_HISTORY_MAX:])
    return tuple(note for note in notes if note is not None)


def last_turn(turns: str) -> TurnNote | None:
    """Return the last turn of a history, if there is one that this version can read."""
    return _note(turns.rpartition("\n")[2]) if turns else None


def _line(note: TurnNote) -> str:
    reason = escape_line(note.reason)[:TURN_REASON_CHARS_MAX]
    items = [
        VERSION, note.id, round(note.at_s, 3), note.node, note.outcome, note.cache, note.match,
        reason, note.prompt_tokens, note.cached_tokens, note.fetched_tokens,
        note.completion_tokens, [_round_s(getattr(note.times, name)) for name in _TIMES],
    ]  # fmt: skip
    return json.dumps(items, separators=(",", ":"))


def _round_s(seconds: float | None) -> float | None:
    return None if seconds is None else round(max(0.0, seconds), _ROUND_DIGITS)


def _note(line: str) -> TurnNote | None:
    """Read one line; return None for an unknown version or anything invalid."""
    if len(line) > TURN_LINE_CHARS_MAX:
        return None
    try:
        version, turn, at_s, node, *words = json.loads(line)
        *words, prompt, cached, fetched, completion, times = words[:9]
        id_, node = parse_turn_id(turn), parse_node_name(node)
    except (ValueError, TypeError, RecursionError, RejectedError):
        return None
    counts, spent = (prompt, cached, fetched, completion), _times(times)
    is_sound = all(isinstance(word, str) for word in words) and all(map(_is_count, counts))
    if version != VERSION or not (is_sound and _is_seconds(at_s)) or spent is None:
        return None
    outcome, cache, match, reason = words
    return TurnNote(id_, float(at_s), node, outcome, cache, match, reason, *counts, spent)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _COUNT_MAX


def _times(values: Any) -> TurnTimes | None:
    if not isinstance(values, list) or len(values) < len(_TIMES):
        return None
    spent = dict(zip(_TIMES, values, strict=False))
    seconds = (
        value for name, value in spent.items() if value is not None or name != "first_token_s"
    )
    return TurnTimes(**spent) if all(map(_is_seconds, seconds)) else None


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= _SECONDS_MAX

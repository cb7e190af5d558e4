"""Move lines that state the date out of the system prompt, so that tomorrow's begins the same.

They go to the start of the user's first message: everything before it is shared by conversations,
and a conversation keeps what it began with.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fabric.turn.messages import Message, MessageRole

_DATE: Final = (
    r"(?:today(?:'s|\u2019s)? (?:date\b|is\b)|(?:the )?current (?:date|day|time)\b"
    r"|date(?: and time)?:)"
)
DATE_LINE: Final = re.compile(
    rf"^[ \t]*(?:[-*>#]+ )?\**{_DATE}[^\n]{{0,160}}$\n?", re.IGNORECASE | re.MULTILINE
)


def move_date_lines(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages with the system prompt's dates at the start of the user's first."""
    users = (at for at, message in enumerate(messages) if message.role is MessageRole.USER)
    first = next(users, len(messages))
    moved, kept = [], []
    for message in messages[:first]:
        text = "".join(message.texts)
        lines = [line.strip() for line in DATE_LINE.findall(text)]
        rest = DATE_LINE.sub("", text).rstrip("\n") if lines else text
        is_moved = message.role is MessageRole.SYSTEM and bool(rest)
        moved += lines if is_moved else []
        kept.append(replace(message, texts=(rest,)) if is_moved and lines else message)
    if not moved or first == len(messages):
        return messages
    text = "\n".join(moved) + "\n\n" + "".join(messages[first].texts)
    return [*kept, replace(messages[first], texts=(text,)), *messages[first + 1 :]]

"""Move lines that tell the date out of the system prompt, so that tomorrow begins as today does.

They go to the front of the user's first message: all that comes before it is shared by
conversations, and a conversation keeps what it began with.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from fabric.turn.messages import Message, MessageRole

_TOLD: Final = (
    r"(?:today(?:'s|\u2019s)? (?:date\b|is\b)|(?:the )?current (?:date|day|time)\b"
    r"|date(?: and time)?:)"
)
DATE_LINE: Final = re.compile(
    rf"^[ \t]*(?:[-*>#]+ )?\**{_TOLD}[^\n]{{0,160}}$\n?", re.IGNORECASE | re.MULTILINE
)


def with_dates_moved(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages whose dates come first in what the user says first."""
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
    said = "\n".join(moved) + "\n\n" + "".join(messages[first].texts)
    return [*kept, replace(messages[first], texts=(said,)), *messages[first + 1 :]]

"""Validation of a policy's edits, and the number of messages that it changed."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from fabric.codec import dump_json, from_plain, to_plain
from fabric.errors import RejectedError
from fabric.limits import BODY_BYTES_MAX, MESSAGES_MAX
from fabric.turn.messages import Message, MessageRole, template_form
from router.large_work import weigh
from router.policies.exchanges import last_of, unpaired

_ALL: Final = 1 << 40  # bytes: more than any conversation has


class InvalidEditError(Exception):
    """Invalid result of a policy."""


def checked(before: Sequence[Message], after: Any) -> tuple[Message, ...]:
    """Return a policy's result as messages; raise InvalidEditError if it is invalid."""
    if not isinstance(after, (list, tuple)):
        message = "did not return a list"
        raise InvalidEditError(message)
    if not 0 < len(after) <= MESSAGES_MAX:
        message = f"returned {len(after)} messages"
        raise InvalidEditError(message)
    known = {id(each) for each in before}
    made = tuple(each if id(each) in known else _rebuilt(each) for each in after)
    for what, is_wrong in _FORBIDDEN:
        if is_wrong(before, made):
            raise InvalidEditError(what)
    return made


def edited_count(before: Sequence[Message], after: Sequence[Message]) -> int:
    """Return the number of messages that were changed or dropped."""
    come, left = {id(message) for message in before}, {id(message) for message in after}
    made = Counter(_key(message) for message in after if id(message) not in come)
    count = 0
    for message in before:
        if id(message) in left:
            continue
        key = _key(message)
        if made[key]:  # an equal copy
            made[key] -= 1
        else:
            count += 1
    return count


def _key(message: Message) -> bytes:
    return dump_json(template_form(message))


def _rebuilt(message: Any) -> Message:
    """Return a message whose parts all have their types and can be sent to a node."""
    try:
        if type(message) is Message:
            plain = to_plain(message)
            json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
            made: Message = from_plain(Message, plain)
            return made
    except (RejectedError, TypeError, ValueError, RecursionError, AttributeError):
        pass
    what = "returned an item that is not a message"
    raise InvalidEditError(what)


def _systems(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.role is MessageRole.SYSTEM]


def _last_said(messages: Sequence[Message]) -> Message | None:
    at = last_of(messages, MessageRole.USER)
    return messages[at] if at >= 0 else None


def _changes_system(before: Sequence[Message], after: Sequence[Message]) -> bool:
    is_first = before[0].role is MessageRole.SYSTEM
    return _systems(before) != _systems(after) or (is_first and before[0] != after[0])


_FORBIDDEN: Final[Sequence[tuple[str, Callable[[Sequence[Message], Sequence[Message]], bool]]]] = (
    ("changed the system prompt", _changes_system),
    ("changed the user's last message", lambda a, b: _last_said(a) != _last_said(b)),
    ("changed the last message", lambda a, b: a[-1] != b[-1]),
    ("parted a call from its result", lambda a, b: bool(unpaired(b) - unpaired(a))),
    ("returned too much", lambda a, b: weigh(b, _ALL) > max(BODY_BYTES_MAX, weigh(a, _ALL))),
)

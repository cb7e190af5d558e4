"""Parts of a message besides its text: thoughts, and its calls' names, ids and arguments."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

from fabric.limits import CALL_IDS_KNOWN_MAX, JSON_DEPTH_MAX, MESSAGES_MAX
from fabric.record.hashed_text import HashedText, replace_text, text_places
from fabric.record.message_positions import DIGEST_BYTES, message_digest
from fabric.turn.messages import Message, ToolUse, spelled_arguments

_ID_BYTES: Final = 8


class MessagePart(StrEnum):
    """Part of a message, other than its text, that a directive replaces."""

    ARGUMENTS = "arguments"  # of the call that it names


@dataclass(frozen=True, slots=True)
class OtherParts:
    """Calls that a message makes or answers, and the size of its content besides text."""

    number: int  # of the message
    chars: int  # of thoughts, names, ids and arguments
    digest: bytes  # of role and text, without calls
    ids: tuple[bytes, ...] = ()  # digests of its calls' ids, the client's and the model's

    @property
    def is_valid(self) -> bool:
        """Return whether the values are in range."""
        in_range = 0 <= self.number < MESSAGES_MAX and self.chars >= 0
        sizes = {len(digest) for digest in self.ids} <= {_ID_BYTES} and len(
            self.digest
        ) == DIGEST_BYTES
        return in_range and sizes and len(self.ids) <= CALL_IDS_KNOWN_MAX


def other_parts(number: int, message: Message, sent: Message) -> OtherParts | None:
    """Describe a message; `sent` is how its client spells it. Return None if it is text only."""
    call_ids = [use.id for one in (message, sent) for use in one.uses]
    ids = {*call_ids, message.result_of, sent.result_of} - {None}
    chars = sum(map(len, _all_parts(message)))
    if not ids and not chars:
        return None
    digests = sorted(map(id_digest, filter(None, ids)))
    return OtherParts(number, chars, text_only_digest(message), tuple(digests))


def id_digest(call_id: str) -> bytes:
    """Return the digest of a call's id."""
    spelled = call_id.encode("utf-8", "surrogatepass")
    return blake2b(spelled, digest_size=_ID_BYTES, person=b"mf-call-id").digest()


def text_only_digest(message: Message) -> bytes:
    """Return the digest of a message without its calls."""
    return message_digest(replace(message, uses=()) if message.uses else message)


def all_words(message: Message) -> str:
    """Return all text that replacing the whole message removes."""
    arguments = (spelled_arguments(use.arguments) for use in message.uses if use.arguments)
    return "".join([message.reasoning or "", *message.texts, *arguments])


def without_arguments(message: Message) -> Message:
    """Empty the arguments of all calls: a call stays with its result."""
    return replace(message, uses=tuple(replace(use, arguments={}) for use in message.uses))


def with_arguments(message: Message, use_at: int, text: str | None) -> Message:
    """Replace the arguments of one call by a JSON object; by none if there is no text."""
    uses = list(message.uses)
    uses[use_at] = replace(uses[use_at], arguments=read_object(text) or {})
    return replace(message, uses=tuple(uses))


def read_object(text: str | None) -> dict[str, Any] | None:
    """Parse JSON text; None unless it is an object."""
    try:
        parsed = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def has_words(message: Message, wanted: HashedText) -> bool:
    """Return whether a message contains a text outside its own text."""
    return any(text_places(wanted, part) for part in _all_parts(message))


def without_words(message: Message, wanted: HashedText, text: str) -> Message:
    """Replace a text wherever a message has it outside its own text."""
    uses = tuple(
        ToolUse(
            replace_text(wanted, use.name, text),
            _arguments_without(use.arguments, wanted, text),
            None if use.id is None else replace_text(wanted, use.id, text),
        )
        for use in message.uses
    )
    reasoning = None if message.reasoning is None else replace_text(wanted, message.reasoning, text)
    return replace(message, reasoning=reasoning, uses=uses)


def _all_parts(message: Message) -> Iterator[str]:
    if message.reasoning:
        yield message.reasoning
    for use in message.uses:
        yield use.name
        if use.id:
            yield use.id
        if use.arguments:
            yield from _spellings(use.arguments)


def _spellings(arguments: dict[str, Any] | str) -> Iterator[str]:
    """Yield the texts in which a template or a client may show arguments."""
    yield spelled_arguments(arguments)
    yield from _leaves(arguments, JSON_DEPTH_MAX)
    if isinstance(arguments, str):
        yield arguments
        return
    yield json.dumps(arguments)
    yield json.dumps(arguments, ensure_ascii=False)
    yield str(getattr(arguments, "text", ""))  # as the model wrote them


def _leaves(value: Any, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and depth:
        for key, item in value.items():
            yield key
            yield from _leaves(item, depth - 1)
    elif isinstance(value, list) and depth:
        for item in value:
            yield from _leaves(item, depth - 1)


def _arguments_without(
    arguments: dict[str, Any] | str, wanted: HashedText, text: str
) -> dict[str, Any] | str:
    """Replace a text in arguments; empty them if it is not within one of their values."""
    if not arguments or not any(
        text_places(wanted, spelling) for spelling in _spellings(arguments)
    ):
        return arguments
    parsed = read_object(arguments) if isinstance(arguments, str) else dict(arguments)
    if parsed is None:
        return replace_text(wanted, str(arguments), text)
    remaining: dict[str, Any] = _without(parsed, wanted, text, JSON_DEPTH_MAX)
    if not text_places(wanted, text) and any(text_places(wanted, e) for e in _spellings(remaining)):
        remaining = {}  # it is a number, or spans several values
    return json.dumps(remaining, ensure_ascii=False) if isinstance(arguments, str) else remaining


def _without(value: Any, wanted: HashedText, text: str, depth: int) -> Any:
    if isinstance(value, str):
        return replace_text(wanted, value, text)
    if isinstance(value, dict) and depth:
        return {
            replace_text(wanted, key, text): _without(item, wanted, text, depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, list) and depth:
        return [_without(item, wanted, text, depth - 1) for item in value]
    return value

"""Positions of messages in an agent's text after its turn; directives find messages by them."""

from dataclasses import replace

from fabric.record.directed_messages import edits_of
from fabric.record.message_parts import OtherParts, other_parts
from fabric.record.message_positions import (
    MessagePositions,
    SentMessage,
    find_positions,
    message_digest,
)
from node.prompt.directed_request import DirectedRequest
from node.prompt.earlier_answers import ShownAnswer


def positions_after(
    before: MessagePositions | None,
    prompt: DirectedRequest,
    text: bytes,
    answer: bytes,
    shown: ShownAnswer,
) -> MessagePositions | None:
    """Return positions in a prompt's `text` and its answer; `before` are the record's."""
    request, positions = prompt.request, prompt.positions
    if request.resume is not None:
        if before is None or request.extends or not prompt.sent:
            return before
        # Without the begun answer.
        positions = MessagePositions(before.messages[: len(prompt.sent)])
    elif request.extends:
        return before.edited(edits_of(prompt.matched)) if before is not None else None
    if positions is None or not answer:
        return positions.within(len(text)) if positions is not None else None
    if request.continues:  # the client will send that message together with its rest
        sent_count = len(prompt.sent) or len(positions.messages)
        return MessagePositions(positions.messages[: sent_count - 1])
    message = shown.message
    sent = SentMessage(message.role, message_digest(message), len(shown.text), shown.text)
    last = find_positions([sent], answer, ()).messages[0]
    start = None if last.start is None else len(text) + last.start
    return MessagePositions((*positions.messages, replace(last, start=start)))


def parts_after(
    before: tuple[OtherParts, ...] | None,
    prompt: DirectedRequest,
    answer: bytes,
    shown: ShownAnswer,
) -> tuple[OtherParts, ...] | None:
    """Return the parts of messages besides text, after a prompt's answer; None: unknown."""
    request = prompt.request
    if request.resume is not None:
        if before is None or request.extends or not prompt.sent:
            return before
        count = len(prompt.sent)
        parts = tuple(other for other in before if other.number < count)
    elif request.extends or prompt.parts is None or prompt.positions is None:
        return None  # appended text belongs to no numbered message
    else:
        parts, count = prompt.parts, len(prompt.positions.messages)
    if not answer or request.continues:
        return parts
    last = other_parts(count, shown.message, shown.message)
    return (*parts, last) if last is not None else parts

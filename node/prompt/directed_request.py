"""Requests under an agent's directives: messages replaced, edits chosen, positions after the turn.

A directive finds its message in the agent's record, which has the positions of all messages in the
agent's text, and the parts that each has besides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.edit_mode import EditMode
from fabric.record.directed_messages import edit_messages, edits_of, pending_directives
from fabric.record.directive import Directive, live_directives
from fabric.record.manifest import Manifest
from fabric.record.message_parts import OtherParts, other_parts
from fabric.record.message_positions import (
    MessagePositions,
    SentMessage,
    find_positions,
    message_digest,
)
from fabric.turn.generation import GenerateRequest, IdentityKind
from fabric.turn.messages import Message
from node.prompt.earlier_answers import ShownAnswer


@dataclass(frozen=True, slots=True)
class DirectedRequest:
    """A request to render, and the directives that changed it."""

    request: GenerateRequest
    matched: tuple[Directive, ...] = ()
    sent: tuple[SentMessage, ...] = ()  # the messages of a named agent, as they were sent
    positions: MessagePositions | None = None  # their positions in the prompt, once it is encoded
    parts: tuple[OtherParts, ...] | None = None  # what they have besides their texts
    redacted: Mapping[int, Message] = field(default_factory=dict)  # answers as directives left them


def apply_directives(
    request: GenerateRequest,
    directives: Sequence[Directive],
    salt: bytes,
    sent: Sequence[Message] | None = None,
) -> DirectedRequest:
    """Replace the messages that directives name; `sent` has them as the client sent them.

    If any matching directive forgets its message, the prompt is computed anew from there once,
    whatever mode the request asks for.
    """
    is_named = request.identity.kind is IdentityKind.AGENT
    if request.messages is None or not (directives or is_named):
        return DirectedRequest(request)
    edited = edit_messages(request.messages, directives, salt, sent)
    mode = _edit_mode(request.edits, edited.matched)
    request = replace(request, messages=edited.messages, edits=mode)
    return DirectedRequest(
        request, edited.matched, edited.sent, parts=edited.parts, redacted=edited.redacted
    )


def follow_record(directed: DirectedRequest, record: Manifest) -> DirectedRequest:
    """Adapt a directed request to the record that its turn continues.

    A prompt that extends the record has the record's pending edits applied already.
    """
    request = directed.request
    if request.resume is not None:
        return directed
    if request.extends:
        matched = pending_directives(record)
        kept = [d for d in live_directives(record.directives) if d.at is not None and d.is_applied]
        mode = _edit_mode(request.edits, [*matched, *kept])
        directed = replace(directed, request=replace(request, edits=mode), matched=matched)
    if record.settings is not None and record.settings.rebuilds:
        request = replace(directed.request, edits=EditMode.FORGET)
        directed = replace(directed, request=request)
    return directed


def _edit_mode(requested: EditMode | None, matched: Sequence[Directive]) -> EditMode | None:
    if any(d.mode is EditMode.FORGET and not d.is_applied for d in matched):
        return EditMode.FORGET
    if requested is None and any(d.mode.keeps for d in matched):
        return EditMode.AMORTIZE
    return requested


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

"""Apply an agent's directives to a request: replace messages, and choose what an edit keeps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.edit_mode import EditMode
from fabric.record.directed_messages import edit_messages, pending_directives
from fabric.record.directive import Directive, live_directives
from fabric.record.manifest import Manifest
from fabric.record.message_parts import OtherParts
from fabric.record.message_positions import MessagePositions, SentMessage
from fabric.turn.generation import GenerateRequest, IdentityKind
from fabric.turn.messages import Message


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

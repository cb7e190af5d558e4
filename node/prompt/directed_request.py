"""A request as an agent's directives have it: messages replaced, and what is kept behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fabric.edit_mode import EditMode
from fabric.record.directed import directed
from fabric.record.directive import Directive, live
from fabric.record.manifest import Manifest
from fabric.record.message_parts import OtherParts
from fabric.record.pending_edits import pending
from fabric.record.said import SaidMessages, Spoken
from fabric.turn.generation import GenerateRequest, IdentityKind
from fabric.turn.messages import Message


@dataclass(frozen=True, slots=True)
class DirectedRequest:
    """What is rendered in the place of what was sent, and which directives had a part in that."""

    request: GenerateRequest
    matched: tuple[Directive, ...] = ()
    note: str = ""  # what was put back into the messages, in words
    spoken: tuple[Spoken, ...] = ()  # the messages of a named agent, as they were sent
    said: SaidMessages | None = None  # where those are in the prompt
    parts: tuple[OtherParts, ...] | None = None  # what they have besides their texts
    redacted: Mapping[int, Message] = field(default_factory=dict)  # answers as they are now


def direct(
    request: GenerateRequest,
    directives: Sequence[Directive],
    note: str,
    salt: bytes,
    sent: Sequence[Message] | None = None,
) -> DirectedRequest:
    """Replace the messages that directives concern, and say how the memory behind them is kept.

    `sent` are the request's messages as its client spells them.

    A message that is to be forgotten takes all behind it with it, once; whatever was asked for.
    """
    is_named = request.identity.kind is IdentityKind.AGENT
    if request.messages is None or not (directives or is_named):
        return DirectedRequest(request, note=note)
    found = directed(request.messages, directives, salt, sent)
    edits = _kept(request.edits, found.matched)
    request = replace(request, messages=found.messages, edits=edits)
    return DirectedRequest(
        request, found.matched, note, found.spoken, parts=found.parts, redacted=found.redacted
    )


def upon(made: DirectedRequest, record: Manifest) -> DirectedRequest:
    """Return it as the record has it that the turn goes on from.

    A prompt that continues the record has what is still to be replaced in that replaced already.
    """
    request = made.request
    if request.resume is not None:
        return made
    if request.extends:
        matched = pending(record)
        kept = [d for d in live(record.directives) if d.at is not None and d.is_applied]
        edits = _kept(request.edits, [*matched, *kept])
        made = replace(made, request=replace(request, edits=edits), matched=matched)
    if record.wishes is not None and record.wishes.rebuilds:
        made = replace(made, request=replace(made.request, edits=EditMode.FORGET))
    return made


def _kept(wished: EditMode | None, matched: Sequence[Directive]) -> EditMode | None:
    if any(d.mode is EditMode.FORGET and not d.is_applied for d in matched):
        return EditMode.FORGET
    if wished is None and any(d.mode.keeps for d in matched):
        return EditMode.AMORTIZE
    return wished

"""Directives as clients write them: where in an agent's memory, and what is to stand there."""

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from fabric.control.node_calls import AgentView
from fabric.edit_mode import DIRECTIVE_MODES, EditMode
from fabric.errors import ConflictError
from fabric.ids import OperationId
from fabric.limits import (
    AGENT_TOKENS_MAX,
    BODY_BYTES_MAX,
    DIRECTED_ID_CHARS_MAX,
    DIRECTED_TEXT_CHARS_MAX,
    DIRECTIVE_BYTES_MAX,
    MESSAGES_MAX,
)
from fabric.record.directive import Directive
from fabric.record.message_parts import MessagePart, read_object
from fabric.record.message_positions import message_digest
from fabric.record.spans import WantedSpan
from fabric.turn.messages import Message, MessageRole
from router.http.fields import Fields, refuse, require_object, require_text

_FORGET = "forget"  # what `exact` comes to, for one message
_MODES = {**DIRECTIVE_MODES, _FORGET: EditMode.FORGET}
_ROLES = (MessageRole.USER, MessageRole.ASSISTANT, MessageRole.TOOL)
_KINDS = ("tool_call_id", "message", "messages", "text", "start_token")
_DETAILS = ("end_token", "start", "end", "every", "replacement", "mode", "part")
_RESULT = "result"  # of a call; or its arguments
_PARTS = (_RESULT, MessagePart.ARGUMENTS)


@dataclass(frozen=True, slots=True)
class Made:
    """Who makes directives, when, and in which operation."""

    operation: OperationId
    made_s: float
    made_by: str


def parse_directive(item: object, param: str, made: Made) -> Directive | WantedSpan:
    """Read one; what only its agent's record can place stays a wish."""
    fields = Fields(require_object(item, param), f"{param}.")
    fields.allow_only(*_KINDS, *_DETAILS)
    mode = fields.text("mode") or _FORGET
    if mode not in _MODES:
        refuse(fields.param("mode"), "expected one of " + ", ".join(sorted(_MODES)))
    text = fields.text("replacement")
    if text is not None and len(text.encode("utf-8", "surrogatepass")) > DIRECTIVE_BYTES_MAX:
        refuse(fields.param("replacement"), f"more than {DIRECTIVE_BYTES_MAX} bytes")
    call_id = fields.text("tool_call_id", DIRECTED_ID_CHARS_MAX)
    named = [kind for kind in _KINDS if fields.raw(kind) is not None]
    part = fields.text("part")
    if part is not None and (part not in _PARTS or named != ["tool_call_id"]):
        refuse(fields.param("part"), "of a tool_call_id: expected one of " + ", ".join(_PARTS))
    if named == ["tool_call_id"]:
        of_arguments = MessagePart.ARGUMENTS if part == MessagePart.ARGUMENTS else None
        if of_arguments and text and read_object(text) is None:
            refuse(fields.param("replacement"), "arguments are an object, as JSON text")
        return Directive(
            made.operation, _MODES[mode], text or "", call_id, None, made.made_s,
            made_by=made.made_by, part=of_arguments,
        )  # fmt: skip
    if named == ["message"] and isinstance(fields.raw("message"), dict):
        return _by_content(fields, made, _MODES[mode], text)
    wanted = WantedSpan(param, made.operation, _MODES[mode], text, made.made_s, made.made_by)
    return _placed(fields, named, wanted)


def _by_content(fields: Fields, made: Made, mode: EditMode, text: str | None) -> Directive:
    message = _message(Fields(fields.object("message") or {}, fields.param("message") + "."))
    span = _chars(fields)
    if span is not None:
        text = text or ""
        if not 0 <= span[0] < span[1] <= len(message.texts[0]):
            refuse(fields.param("end"), f"the message has {len(message.texts[0])} characters")
    return Directive(
        made.operation, mode, text, None, message_digest(message), made.made_s,
        span=span, made_by=made.made_by,
    )  # fmt: skip


def _placed(fields: Fields, named: list[str], wanted: WantedSpan) -> WantedSpan:
    most = MESSAGES_MAX - 1
    if named == ["messages"]:
        part = Fields(fields.object("messages") or {}, fields.param("messages") + ".")
        part.allow_only("first", "last")
        part.require("first")
        part.require("last")
        first, last = part.integer("first", 0, most), part.integer("last", 0, most)
        if first is not None and last is not None and last < first:
            refuse(part.param("last"), "it comes before the first")
        return replace(wanted, first=first, last=last)
    if named == ["message"]:
        return replace(wanted, first=fields.integer("message", 0, most), chars=_chars(fields))
    if named in (["text"], ["message", "text"]):
        sought = fields.text("text", DIRECTED_TEXT_CHARS_MAX)
        if not sought:
            refuse(fields.param("text"), "it is empty")
        first = fields.integer("message", 0, most)
        return replace(wanted, first=first, text=sought, is_every=fields.flag("every"))
    if named == ["start_token"]:
        fields.require("end_token")
        start = fields.integer("start_token", 0, AGENT_TOKENS_MAX)
        end = fields.integer("end_token", 0, AGENT_TOKENS_MAX)
        return replace(wanted, tokens=(start or 0, end or 0))
    return _refuse_kind(wanted.param)


def _refuse_kind(param: str) -> NoReturn:
    refuse(param, "name either a tool_call_id, a message, messages, a text or a start_token")


def _chars(fields: Fields) -> tuple[int, int] | None:
    if fields.raw("start") is None and fields.raw("end") is None:
        return None
    fields.require("end")
    start = fields.integer("start", 0, BODY_BYTES_MAX)
    return start or 0, fields.integer("end", 0, BODY_BYTES_MAX) or 0


def _message(fields: Fields) -> Message:
    role = require_text(fields.require("role"), fields.param("role"))
    if role not in _ROLES:
        refuse(fields.param("role"), "expected one of " + ", ".join(_ROLES))
    return Message(
        MessageRole(role), (require_text(fields.require("content"), fields.param("content")),)
    )


def parse_directives(
    items: list[Any], made: Made
) -> tuple[tuple[Directive, ...], tuple[WantedSpan, ...]]:
    """Read all of a request: what is placed already, and what its agent's record is to place."""
    found = [parse_directive(item, f"directives[{at}]", made) for at, item in enumerate(items)]
    directives = tuple(each for each in found if isinstance(each, Directive))
    return directives, tuple(each for each in found if isinstance(each, WantedSpan))


def require_held(view: AgentView, operation: OperationId) -> AgentView:
    """Return what a node answered; raise ConflictError where it did not make the directives.

    A node never makes an undone operation again: the request may be a late copy of an old one.
    """
    if all(each.operation != operation for each in view.directives or ()):
        message = (
            f"operation {operation} was undone earlier, so nothing was changed: "
            "send the directives with a new operation id"
        )
        raise ConflictError(message, code="operation_undone", param="operation")
    return view

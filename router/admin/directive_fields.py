"""Directives as clients send them: a place in an agent's history, and its new text."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

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
    DIRECTIVES_MAX,
    MESSAGES_MAX,
)
from fabric.record.directive import Directive
from fabric.record.message_parts import MessagePart, read_object
from fabric.record.message_positions import message_digest
from fabric.record.spans import WantedSpan
from fabric.turn.messages import Message, MessageRole
from router.http.refusals import refuse, require_text, wrong_type
from router.http.schema import (
    ArrayOf,
    Either,
    Flag,
    Integer,
    ObjectOf,
    Parsed,
    Text,
    WordIn,
    optional,
    param_path,
    refuse_missing,
    required,
)

_FORGET: Final = "forget"  # the same as `exact` for one message
DIRECTIVE_MODE: Final = WordIn(dict(sorted({**DIRECTIVE_MODES, _FORGET: EditMode.FORGET}.items())))
_ROLES: Final = {
    role.value: role for role in (MessageRole.USER, MessageRole.ASSISTANT, MessageRole.TOOL)
}
_RESULT: Final = "result"  # of a call; the other part is its arguments
_PARTS: Final = (_RESULT, MessagePart.ARGUMENTS)
CALL_ID: Final = Text(DIRECTED_ID_CHARS_MAX, 1)
MESSAGE_NUMBER: Final = Integer(0, MESSAGES_MAX - 1)
_TOKEN: Final = Integer(0, AGENT_TOKENS_MAX)
_CHAR: Final = Integer(0, BODY_BYTES_MAX)


def _replacement(value: Any, param: str) -> str:
    text = require_text(value, param)
    if len(text.encode("utf-8", "surrogatepass")) > DIRECTIVE_BYTES_MAX:
        refuse(param, f"more than {DIRECTIVE_BYTES_MAX} bytes")
    return text


def _part(value: Any, param: str) -> str:
    part = require_text(value, param)
    return part if part in _PARTS else _refuse_part(param)


def _refuse_part(param: str) -> NoReturn:
    refuse(param, "of a tool_call_id: expected one of " + ", ".join(_PARTS))


@dataclass(frozen=True, slots=True)
class DirectiveOrigin:
    """Author, time and operation of directives."""

    operation: OperationId
    made_s: float
    made_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _SentMessage:
    """Message identified by its content."""

    role: MessageRole = required(WordIn(_ROLES))
    content: str = required(Text())


@dataclass(frozen=True, slots=True, kw_only=True)
class _MessageRange:
    """Messages by number, from the first to the last, inclusive."""

    first: int = required(MESSAGE_NUMBER)
    last: int = required(MESSAGE_NUMBER)
    param: str = param_path()


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveBody:
    """One directive: where in an agent's memory, and what replaces it."""

    tool_call_id: str | None = optional(CALL_ID)
    message: _SentMessage | int | None = optional(
        Either({dict: ObjectOf(_SentMessage), int: MESSAGE_NUMBER})
    )
    messages: _MessageRange | None = optional(ObjectOf(_MessageRange, is_strict=True))
    text: str | None = optional(Text(DIRECTED_TEXT_CHARS_MAX, 1))
    start_token: int | None = optional(_TOKEN)
    end_token: int | None = optional(_TOKEN)
    start: int | None = optional(_CHAR)
    end: int | None = optional(_CHAR)
    every: bool = optional(Flag(), False)
    replacement: str | None = optional(
        Parsed(_replacement, Text(DIRECTIVE_BYTES_MAX // 4).schema())
    )
    mode: EditMode = optional(DIRECTIVE_MODE, EditMode.FORGET)
    part: str | None = optional(Parsed(_part, WordIn({part: part for part in _PARTS}).schema()))
    param: str = param_path()

    def placed(self, origin: DirectiveOrigin) -> Directive | WantedSpan:
        """Return the directive, or a span where only the agent's record can place it."""
        if self.part is not None and self.tool_call_id is None:
            _refuse_part(f"{self.param}.part")
        if self.tool_call_id is not None:
            return self._of_call(origin)
        if isinstance(self.message, _SentMessage):
            return self._of_content(self.message, origin)
        span = WantedSpan(
            self.param, origin.operation, self.mode, self.replacement, origin.made_s, origin.made_by
        )
        if self.messages is not None:
            if self.messages.last < self.messages.first:
                refuse(f"{self.messages.param}.last", "it comes before the first")
            return replace(span, first=self.messages.first, last=self.messages.last)
        if self.text is not None:
            return replace(span, first=self.message, text=self.text, is_every=self.every)
        if self.message is not None:
            return replace(span, first=self.message, chars=self._chars())
        return replace(span, tokens=(self.start_token or 0, self.end_token or 0))

    def _of_call(self, origin: DirectiveOrigin) -> Directive:
        part = MessagePart.ARGUMENTS if self.part == MessagePart.ARGUMENTS else None
        if part and self.replacement and read_object(self.replacement) is None:
            refuse(f"{self.param}.replacement", "it must be a JSON object, as text")
        return Directive(
            origin.operation, self.mode, self.replacement or "", self.tool_call_id, None,
            origin.made_s, made_by=origin.made_by, part=part,
        )  # fmt: skip

    def _of_content(self, sent: _SentMessage, origin: DirectiveOrigin) -> Directive:
        if self.text is not None:
            wrong_type({}, f"{self.param}.message", "an integer")
        span, replacement = self._chars(), self.replacement
        if span is not None:
            replacement = replacement or ""
            if not 0 <= span[0] < span[1] <= len(sent.content):
                size = len(sent.content)
                refuse(f"{self.param}.end", f"start and end must be within the {size} characters")
        digest = message_digest(Message(sent.role, (sent.content,)))
        return Directive(
            origin.operation, self.mode, replacement, None, digest, origin.made_s,
            span=span, made_by=origin.made_by,
        )  # fmt: skip

    def _chars(self) -> tuple[int, int] | None:
        if self.start is None and self.end is None:
            return None
        if self.end is None:
            refuse_missing(f"{self.param}.end")
        return self.start or 0, self.end


DIRECTIVES: Final = ArrayOf(
    ObjectOf(
        DirectiveBody,
        is_strict=True,
        one_of=(
            ("tool_call_id",),
            ("message",),
            ("messages",),
            ("text",),
            ("message", "text"),
            ("start_token", "end_token"),
        ),
        hint="name either a tool_call_id, a message, messages, a text or a start_token",
    ),
    DIRECTIVES_MAX,
    count_min=1,
)
Placed = tuple[tuple[Directive, ...], tuple[WantedSpan, ...]]


def place_directives(directives: Iterable[DirectiveBody], origin: DirectiveOrigin) -> Placed:
    """Return directives whose place is known, and spans that the agent's record must place."""
    placed = [directive.placed(origin) for directive in directives]
    return (
        tuple(one for one in placed if isinstance(one, Directive)),
        tuple(one for one in placed if isinstance(one, WantedSpan)),
    )


def require_held(view: AgentView, operation: OperationId) -> AgentView:
    """Return a node's answer; raise ConflictError if it does not hold the directives.

    A node never repeats an operation that was undone: the request may be a late copy of an old one.
    """
    if all(directive.operation != operation for directive in view.directives or ()):
        message = (
            f"operation {operation} was undone earlier, so nothing was changed: "
            "send the directives with a new operation id"
        )
        raise ConflictError(message, code="operation_undone", param="operation")
    return view

"""Control messages for an agent's directives and settings."""

from dataclasses import dataclass

from fabric.control.agent_at import AgentName
from fabric.edit_mode import EditMode
from fabric.ids import OperationId
from fabric.record.directive import Directive
from fabric.record.spans import WantedSpan


@dataclass(frozen=True, slots=True)
class DirectAgent(AgentName):
    """Request to add directives to an agent, all or none, or to undo those of some operations."""

    added: tuple[Directive, ...] = ()
    removed: tuple[OperationId, ...] = ()
    removes_all: bool = False
    spans: tuple[WantedSpan, ...] = ()  # directives whose place the node finds
    now_s: float = 0.0

    @property
    def may_revoke(self) -> bool:
        """Return whether other nodes may have to drop prefixes of the agent."""
        modes = {edit.mode for edit in self.added} | {span.mode for span in self.spans}
        return EditMode.FORGET in modes


@dataclass(frozen=True, slots=True)
class ChangeSettings(AgentName):
    """Request to change settings of an agent; None leaves a setting unchanged."""

    rebuilds: bool | None = None
    closes: bool | None = None  # drops its cache from memory, and its pin
    decays: bool | None = None
    decays_after_s: float = 0.0
    is_private: bool | None = None

    @property
    def may_revoke(self) -> bool:
        """Return whether other nodes may have to drop prefixes of the agent."""
        return bool(self.is_private)


@dataclass(frozen=True, slots=True)
class ReadMemory(AgentName):
    """Request for the messages in an agent's memory and the edits made to them."""


@dataclass(frozen=True, slots=True)
class DirectiveView:
    """Directive as clients see it, without texts."""

    operation: OperationId
    mode: EditMode
    replacement_chars: int | None  # None: the message is removed
    result_of: str | None
    made_s: float
    is_applied: bool
    message: int | None = None  # its number in the agent's last turn, if it was there
    start: int | None = None  # characters of the message; None: all of it
    end: int | None = None
    dropped_chars: int | None = None
    dropped_digest: str | None = None
    made_by: str | None = None
    holds_for: tuple[str, ...] = ("chats",)
    undone_s: float | None = None
    part: str | None = None  # arguments of a call, or a text beside the message's content


@dataclass(frozen=True, slots=True)
class MessageView:
    """Message of an agent's memory: its number, role and token range."""

    number: int
    role: str
    chars: int  # as the client sent it
    start_token: int | None
    end_token: int | None
    is_edited: bool


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Messages of an agent's memory, and its active and undone directives."""

    tokens: int
    messages: tuple[MessageView, ...]
    directives: tuple[DirectiveView, ...]
    undone: tuple[DirectiveView, ...]


def directive_view(directive: Directive, number: int | None = None) -> DirectiveView:
    """Return the view of a directive; `number` is that of its message."""
    text, span, out = directive.replacement, directive.span, directive.dropped
    is_of_chats = directive.result_of is not None or directive.message_digest is not None
    kinds = (("chats", is_of_chats), ("generate", directive.at is not None))
    return DirectiveView(
        directive.operation,
        directive.mode,
        None if text is None else len(text),
        directive.result_of,
        directive.made_s,
        directive.is_applied,
        number,
        span[0] if span is not None else None,
        span[1] if span is not None else None,
        out.chars if out is not None else None,
        out.digest if out is not None else None,
        directive.made_by,
        tuple(kind for kind, holds in kinds if holds),
        directive.undone_s,
        directive.part if directive.besides_text is None else "besides_text",
    )

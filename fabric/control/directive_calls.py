"""The control calls that edit what an agent is told, or say something of it as a whole."""

from dataclasses import dataclass

from fabric.control.agent_at import AgentName
from fabric.edit_mode import EditMode
from fabric.ids import OperationId
from fabric.record.directive import Directive
from fabric.record.spans import WantedSpan


@dataclass(frozen=True, slots=True)
class DirectAgent(AgentName):
    """Add directives to an agent, all or none, or take those of some operations back."""

    added: tuple[Directive, ...] = ()
    removed: tuple[OperationId, ...] = ()
    removes_all: bool = False
    spans: tuple[WantedSpan, ...] = ()  # directives that the node is to place
    now_s: float = 0.0

    @property
    def may_revoke(self) -> bool:
        """Return whether others may have to drop what they borrowed of the agent."""
        modes = [each.mode for each in self.added] + [each.mode for each in self.spans]
        return EditMode.FORGET in modes


@dataclass(frozen=True, slots=True)
class WishOfAgent(AgentName):
    """Say of an agent as a whole what is not None."""

    rebuilds: bool | None = None
    closes: bool | None = None  # it is done: its hot memory goes, and so does its pin
    decays: bool | None = None
    decays_after_s: float = 0.0
    is_private: bool | None = None

    @property
    def may_revoke(self) -> bool:
        """Return whether others may have to drop what they borrowed of the agent."""
        return bool(self.is_private)


@dataclass(frozen=True, slots=True)
class CoolAgent(AgentName):
    """Let go of an agent's hot memory; what its disk has of it stays."""


@dataclass(frozen=True, slots=True)
class DropReplica(AgentName):
    """Let go of an agent on a node that does not own it."""


@dataclass(frozen=True, slots=True)
class ReadMemory(AgentName):
    """Ask which messages an agent's memory is of, and what was done to them."""


@dataclass(frozen=True, slots=True)
class DirectiveView:
    """A directive as it is shown: without texts."""

    operation: OperationId
    mode: EditMode
    replacement_chars: int | None  # None: the message is left out
    result_of: str | None
    made_s: float
    is_applied: bool
    message: int | None = None  # its number, where its agent's last turn had it
    start: int | None = None  # characters of the message; None: all of it
    end: int | None = None
    dropped_chars: int | None = None
    dropped_digest: str | None = None
    made_by: str | None = None
    holds_for: tuple[str, ...] = ("chats",)
    undone_s: float | None = None
    part: str | None = None  # arguments of a call, or a text besides the message's own


@dataclass(frozen=True, slots=True)
class MessageView:
    """A message of an agent's memory: its number, who says it, and where it is."""

    number: int
    role: str
    chars: int  # as its client sends it
    start_token: int | None
    end_token: int | None
    is_edited: bool


@dataclass(frozen=True, slots=True)
class MemoryView:
    """Parts of an agent's memory that can be named, and its directives, present and past."""

    tokens: int
    messages: tuple[MessageView, ...]
    directives: tuple[DirectiveView, ...]
    undone: tuple[DirectiveView, ...]


def viewed(directive: Directive, number: int | None = None) -> DirectiveView:
    """Describe a directive to whoever asks; `number` is that of its message."""
    text, span, out = directive.replacement, directive.span, directive.dropped
    is_of_chats = directive.result_of is not None or directive.said is not None
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
        directive.part if directive.sought is None else "besides_text",
    )

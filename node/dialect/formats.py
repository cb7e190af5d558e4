"""Formats of a model family's thoughts and tool calls, and the signs to recognize them by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, Protocol

from fabric.turn.answer_constraints import CallChoice
from node.dialect.answer_delta import AnswerDelta
from node.dialect.call_grammar import CallGrammar
from node.dialect.call_reader import MakeReader
from node.grammar.thought import ThoughtMarks


class Rank(IntEnum):
    """Order in which signs are looked for: the lowest rank found in a template decides."""

    OWN = 0  # no other family writes it
    COMBINATION = 1  # others write a part of it
    SHARED = 2  # others with a lower rank write it, too
    COMMON = 3  # many families write it
    BASE = 4  # sign of a base model, kept in its fine-tunes' templates
    WORD = 5  # no mark, but a word


@dataclass(frozen=True, slots=True)
class TemplateSign:
    """Texts that identify a format if a chat template has all of them."""

    texts: tuple[str, ...]
    rank: Rank = Rank.OWN


def sign(*texts: str, rank: Rank = Rank.OWN) -> tuple[TemplateSign]:
    """Return a format's only sign."""
    return (TemplateSign(texts, rank),)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Format of tool calls: the marks around them, their reader and their grammar."""

    name: str
    starts: tuple[str, ...]
    end: str  # "": only the answer's end
    make_reader: MakeReader
    inner_starts: tuple[str, ...] = ()  # those of `starts` that are a part of the call
    make_bare_reader: MakeReader | None = None  # for answers that may be a call without marks
    grammar: CallGrammar | None = None  # None: calls cannot be enforced
    signs: tuple[TemplateSign, ...] = ()
    aliases: tuple[str, ...] = ()  # names that mlx-lm or operators use


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """Marks around a thought."""

    name: str
    start: str
    end: str
    signs: tuple[TemplateSign, ...] = ()
    # White space after the start, before the end and after it, unless the template shows its own.
    spacing: tuple[str, str, str] = ("", "", "")


class ThoughtStage(Enum):
    """Stage of an answer: in a thought, where one may begin, or elsewhere."""

    THOUGHT = auto()
    CALL = auto()  # within a thought, which may be more than a quote
    OPEN = auto()
    ELSEWHERE = auto()


class AnswerReader(Protocol):
    """Parser of an answer's text; the result does not depend on how the text is split."""

    broken_calls: int  # calls that were cut or malformed
    has_cut_call: bool  # the answer's end cut the last call that was shown

    @property
    def has_calls(self) -> bool:
        """Whether calls were shown to their end, whole or broken."""
        ...

    @property
    def stage(self) -> ThoughtStage: ...

    def begin(self, begun: str) -> None:
        """Start an answer that the prompt has begun; discard any earlier one."""
        ...

    def feed(self, text: str) -> AnswerDelta: ...

    def finish(self, *, is_cut: bool = False) -> AnswerDelta:
        """Return the text held back: the answer ends here, or `is_cut` at its token limit."""
        ...


MakeAnswerReader = Callable[[tuple[str, ...], list[Any] | None, str, CallChoice], AnswerReader]


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Format of answers that are several messages, each with a header that says what it is."""

    name: str
    make_reader: MakeAnswerReader  # of stop strings, tools, a seed for ids of calls, and a choice
    grammar: CallGrammar
    thought_marks: ThoughtMarks
    efforts: Mapping[str, str]  # `reasoning_effort` of other families → the nearest known here
    thought_end: str  # ends a thought, and begins the header of a message that is none
    other_parts: tuple[str, ...]  # what then may follow: first a text's, then a call's
    signs: tuple[TemplateSign, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """Formats of one model family; each module of `families` defines one as FAMILY."""

    calls: tuple[CallFormat, ...] = ()
    thoughts: tuple[ThoughtFormat, ...] = ()
    hidden_marks: tuple[str, ...] = ()  # other marks, which clients do not see
    messages: MessageFormat | None = None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of one model's answers; without any formats, they are plain text."""

    thought: ThoughtFormat | None = None
    calls: CallFormat | None = None
    hidden_marks: tuple[str, ...] = ()
    messages: MessageFormat | None = None  # replaces the other formats

    @property
    def grammar(self) -> CallGrammar | None:
        """The grammar of calls, where it is known."""
        if self.messages is not None:
            return self.messages.grammar
        return self.calls.grammar if self.calls is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "AnswerFormat":
        return self  # constant: the copies of a reader share it

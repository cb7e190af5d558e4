"""Selection of a model's answer format, by its settings or by what its chat template writes."""

import pkgutil
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, TypeVar

from fabric.errors import FatalError
from node.dialect import families
from node.dialect.formats import (
    AnswerFormat,
    CallFormat,
    Family,
    Rank,
    TemplateSign,
    ThoughtFormat,
)

AUTO, NONE = "auto", "none"


def _families() -> tuple[Family, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    return tuple(import_module(f"{families.__name__}.{name}").FAMILY for name in names)


FAMILIES = _families()
CALL_FORMATS = {calls.name: calls for family in FAMILIES for calls in family.calls}
CALL_ALIASES = {alias: name for name, calls in CALL_FORMATS.items() for alias in calls.aliases}
THOUGHT_FORMATS = {thought.name: thought for family in FAMILIES for thought in family.thoughts}
MESSAGE_FORMATS = {
    family.messages.name: family.messages for family in FAMILIES if family.messages is not None
}


@dataclass(frozen=True, slots=True)
class FormatSettings:
    """An operator's settings of how a model's messages are read and written."""

    calls: str = AUTO
    thoughts: str = AUTO
    template: str = ""  # replaces the model's own template
    options: dict[str, Any] = field(default_factory=dict)  # defaults of the template's options
    is_strict: bool = False  # messages that the template refuses are not folded


@dataclass(frozen=True, slots=True)
class FallbackFormats:
    """Formats that mlx-lm inferred: used where no family's sign is found."""

    thought: ThoughtFormat | None = None
    calls: CallFormat | None = None
    hidden_marks: tuple[str, ...] = ()
    calls_by_name: Callable[[str], CallFormat | None] = lambda _: None


class _Signed(Protocol):
    @property
    def signs(self) -> tuple[TemplateSign, ...]: ...


_Format = TypeVar("_Format", bound=_Signed)


def select_format(
    template: str, vocabulary: Collection[str], settings: FormatSettings, fallback: FallbackFormats
) -> AnswerFormat:
    """Choose the formats of thoughts and calls; raise FatalError for an unknown name."""
    names = settings.calls, settings.thoughts
    if names == (AUTO, AUTO):
        messages = _match(template, MESSAGE_FORMATS.values())
    else:
        messages = next((MESSAGE_FORMATS[name] for name in names if name in MESSAGE_FORMATS), None)
    if messages is not None:
        return AnswerFormat(messages=messages)
    hidden = (mark for family in FAMILIES for mark in family.hidden_marks if mark in vocabulary)
    return AnswerFormat(
        thought=_thoughts(template, vocabulary, settings.thoughts, fallback),
        calls=_calls(template, settings.calls, fallback),
        hidden_marks=(*hidden, *fallback.hidden_marks),
    )


def has_own_sign(template: str, format_: CallFormat | ThoughtFormat | None) -> bool:
    """Return whether a template has a sign that no other family's templates have."""
    if format_ is None:
        return False
    signs = (sign for sign in format_.signs if sign.rank <= Rank.COMBINATION)
    return any(all(text in template for text in sign.texts) for sign in signs)


def _thoughts(
    template: str, vocabulary: Collection[str], name: str, fallback: FallbackFormats
) -> ThoughtFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        if name not in THOUGHT_FORMATS:
            raise _unknown("reasoning_parser", name, THOUGHT_FORMATS)
        return THOUGHT_FORMATS[name]
    thought = _match(template, THOUGHT_FORMATS.values())
    if thought is not None:
        return thought
    # A vocabulary may have marks of other families as well: the common ones are likelier.
    by_rank = reversed(_rank_signs(THOUGHT_FORMATS.values()))
    known = (thought for _, thought in by_rank if {thought.start, thought.end} <= set(vocabulary))
    return next(known, fallback.thought)


def _calls(template: str, name: str, fallback: FallbackFormats) -> CallFormat | None:
    if name == NONE:
        return None
    if name != AUTO:
        format_ = CALL_FORMATS.get(CALL_ALIASES.get(name, name)) or fallback.calls_by_name(name)
        if format_ is None:
            raise _unknown("tool_parser", name, CALL_FORMATS)
        return format_
    inferred = fallback.calls
    if inferred is not None and inferred.name not in {*CALL_FORMATS, *CALL_ALIASES}:
        return inferred  # only mlx-lm can read it
    calls = _match(template, CALL_FORMATS.values())
    if calls is not None or inferred is None:
        return calls
    return CALL_FORMATS[CALL_ALIASES.get(inferred.name, inferred.name)]


def _match(template: str, formats: Iterable[_Format]) -> _Format | None:
    """Return the format whose sign of the lowest rank is in the template."""
    return next(
        (
            format_
            for sign, format_ in _rank_signs(formats)
            if all(t in template for t in sign.texts)
        ),
        None,
    )


def _rank_signs(formats: Iterable[_Format]) -> list[tuple[TemplateSign, _Format]]:
    signs = [(sign, format_) for format_ in formats for sign in format_.signs]
    return sorted(signs, key=lambda signed: signed[0].rank)


def _unknown(setting: str, name: str, known: Collection[str]) -> FatalError:
    names = ", ".join(sorted(known))
    message = f"node.{setting}: unknown name {name!r}; choose one of {names}, auto or none"
    return FatalError(message, code="invalid_settings")

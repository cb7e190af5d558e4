"""`context_management` of a request: what to clear from its conversation, and the report of that.

Clients keep sending the whole conversation; each turn clears it again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from fabric.limits import MESSAGES_MAX
from router.anthropic.content import Notes
from router.http.schema import (
    ArrayOf,
    Either,
    Flag,
    Integer,
    Mapped,
    ObjectOf,
    Tagged,
    Text,
    WordIn,
    constant,
    only,
    optional,
    param_path,
)
from router.limits import CONTEXT_EDITS_MAX, EDIT_VALUE_MAX, TOOLS_MAX
from router.policies.clear_thinking import ClearThinking
from router.policies.clear_tool_uses import Clearing, ClearToolUses
from router.policies.policy import CountedEdit, EditOutcome
from router.policies.truncation import TRUNCATION

_TOOL_USES: Final = "clear_tool_uses_20250919"
_THINKING: Final = "clear_thinking_20251015"
_COUNTS: Final[Mapping[str, str]] = {
    _TOOL_USES: "cleared_tool_uses",
    _THINKING: "cleared_thinking_turns",
    TRUNCATION: "dropped_messages",
}
_TRIGGER_TOKENS: Final = 100_000  # the defaults are those that Anthropic documents
_KEPT_USES: Final = 3
_KEPT_TURNS: Final = 1
_ALL: Final = "all"
_NAMES: Final = ArrayOf(Text(), TOOLS_MAX, names_items=False)


def _amount(low: int, **units: Any) -> Tagged:
    """Return the kind of an amount in one of the units, each with a conversion of its number."""
    number = Integer(low, EDIT_VALUE_MAX)
    known = {unit: Mapped(only("value", number), make) for unit, make in units.items()}
    return Tagged(known, f"expected one of {', '.join(units)}", "invalid_value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trigger:
    """Size of a conversation from which on it is edited; one field is set."""

    tokens: int | None = None
    uses: int | None = None


_TRIGGER: Final = _amount(
    1, input_tokens=lambda n: _Trigger(tokens=n), tool_uses=lambda n: _Trigger(uses=n)
)
_TURNS: Final = _amount(1, thinking_turns=int)
_KEPT: Final = Either(
    {
        str: WordIn({_ALL: MESSAGES_MAX}),
        dict: replace(_TURNS, kinds={**_TURNS.kinds, _ALL: constant(MESSAGES_MAX)}),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClearToolUses:
    trigger: _Trigger = optional(_TRIGGER, _Trigger(tokens=_TRIGGER_TOKENS))
    keep: int = optional(_amount(0, tool_uses=int), _KEPT_USES)
    clear_at_least: int = optional(_amount(0, input_tokens=int), 0)
    exclude_tools: list[str] = optional(_NAMES, ())
    clear_tool_inputs: bool | list[str] = optional(Either({list: _NAMES, bool: Flag()}), False)

    def counted_edit(self) -> CountedEdit:
        inputs = self.clear_tool_inputs
        clearing = Clearing(
            keep=self.keep,
            exclude=frozenset(self.exclude_tools),
            inputs=inputs if isinstance(inputs, bool) else frozenset(inputs),
        )
        trigger, least = self.trigger, self.clear_at_least
        return ClearToolUses(
            _TOOL_USES, clearing, trigger.tokens, trigger.uses, clear_at_least=least
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClearThinking:
    keep: int = optional(_KEPT, _KEPT_TURNS)

    def counted_edit(self) -> CountedEdit:
        return ClearThinking(_THINKING, self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnknownEdit:
    """Edit of a type that this server ignores."""

    param: str = param_path()


_EDIT: Final = Tagged(
    {_TOOL_USES: ObjectOf(_ClearToolUses), _THINKING: ObjectOf(_ClearThinking)},
    other=ObjectOf(_UnknownEdit),
)
AnyEdit = _ClearToolUses | _ClearThinking | _UnknownEdit
CONTEXT_MANAGEMENT: Final = only("edits", ArrayOf(_EDIT, CONTEXT_EDITS_MAX), ())


def counted_edits(edits: Sequence[AnyEdit], notes: Notes) -> tuple[CountedEdit, ...]:
    """Return the edits to perform, and note those that are ignored."""
    for edit in edits:
        if isinstance(edit, _UnknownEdit):
            notes.ignore(edit.param)
    return tuple(edit.counted_edit() for edit in edits if not isinstance(edit, _UnknownEdit))


def report(outcomes: Sequence[EditOutcome]) -> dict[str, Any]:
    """Return the parts that each edit cleared or truncated; omit edits without effect."""
    applied = [
        {
            "type": outcome.name,
            _COUNTS[outcome.name]: outcome.count,
            "cleared_input_tokens": outcome.cleared_tokens,
        }
        for outcome in outcomes
        if outcome.name in _COUNTS and outcome.count
    ]
    return {"applied_edits": applied}

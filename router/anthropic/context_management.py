"""`context_management` of a request: what is cleared of its conversation, and how that is told.

Clients go on sending all of it; what they ask to be cleared is cleared again in each turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fabric.limits import MESSAGES_MAX
from router.anthropic.content import Notes
from router.http.fields import Fields, refuse, require_object, require_text
from router.limits import CONTEXT_EDITS_MAX, EDIT_VALUE_MAX, TOOLS_MAX
from router.policies.clear_thinking import ClearThinking
from router.policies.clear_tool_uses import Clearing, ClearToolUses
from router.policies.counted_edit import CountedEdit
from router.policies.policy import EditOutcome

_TOOL_USES: Final = "clear_tool_uses_20250919"
_THINKING: Final = "clear_thinking_20251015"
_COUNTS: Final[Mapping[str, str]] = {
    _TOOL_USES: "cleared_tool_uses",
    _THINKING: "cleared_thinking_turns",
}
_TRIGGER_TOKENS: Final = 100_000  # where nothing is said, as Anthropic documents it
_KEPT_USES: Final = 3
_KEPT_TURNS: Final = 1


def parse_context_management(fields: Fields, notes: Notes) -> tuple[CountedEdit, ...] | None:
    """Read the edits; None where the field is absent. What is not known is ignored, and told."""
    given = fields.object("context_management")
    if given is None:
        return None
    inner = Fields(given, fields.param("context_management."))
    edits: list[CountedEdit] = []
    for at, item in enumerate(inner.items("edits", CONTEXT_EDITS_MAX) or []):
        param = f"{inner.param('edits')}[{at}]"
        edit = Fields(require_object(item, param), f"{param}.")
        kind = require_text(edit.require("type"), edit.param("type"))
        if kind == _TOOL_USES:
            edits.append(_tool_uses(edit))
        elif kind == _THINKING:
            edits.append(ClearThinking(_THINKING, _turns_kept(edit)))
        else:
            notes.ignore(param)
    return tuple(edits)


def told(outcomes: Sequence[EditOutcome]) -> dict[str, Any]:
    """Spell what was done, of all edits that have done something."""
    applied = [
        {
            "type": each.name,
            _COUNTS[each.name]: each.count,
            "cleared_input_tokens": each.cleared_tokens,
        }
        for each in outcomes
        if each.name in _COUNTS and each.count
    ]
    return {"applied_edits": applied}


def _tool_uses(edit: Fields) -> ClearToolUses:
    kind, threshold = _valued(edit, "trigger", ("input_tokens", "tool_uses"), 1) or (
        "input_tokens",
        _TRIGGER_TOKENS,
    )
    kept = _valued(edit, "keep", ("tool_uses",), 0)
    least = _valued(edit, "clear_at_least", ("input_tokens",), 0)
    clearing = Clearing(
        keep=_KEPT_USES if kept is None else kept[1],
        exclude=_names(edit, "exclude_tools"),
        inputs=_inputs(edit),
    )
    is_tokens = kind == "input_tokens"
    return ClearToolUses(
        _TOOL_USES,
        clearing,
        tokens=threshold if is_tokens else None,
        uses=None if is_tokens else threshold,
        clear_at_least=0 if least is None else least[1],
    )


def _inputs(edit: Fields) -> bool | frozenset[str]:
    """Read whether arguments go, too: of all calls, or of those of some tools."""
    if isinstance(edit.raw("clear_tool_inputs"), list):
        return _names(edit, "clear_tool_inputs")
    return edit.flag("clear_tool_inputs")


def _turns_kept(edit: Fields) -> int:
    keep = edit.raw("keep")
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return MESSAGES_MAX
    kept = _valued(edit, "keep", ("thinking_turns",), 1)
    return _KEPT_TURNS if kept is None else kept[1]


def _valued(fields: Fields, name: str, kinds: Sequence[str], low: int) -> tuple[str, int] | None:
    """Read an amount of something."""
    given = fields.object(name)
    if given is None:
        return None
    inner = Fields(given, fields.param(f"{name}."))
    kind = require_text(inner.require("type"), inner.param("type"))
    if kind not in kinds:
        refuse(inner.param("type"), f"expected one of {', '.join(kinds)}")
    inner.require("value")
    value = inner.integer("value", low, EDIT_VALUE_MAX)
    assert value is not None, "required"
    return kind, value


def _names(fields: Fields, name: str) -> frozenset[str]:
    items = fields.items(name, TOOLS_MAX) or []
    return frozenset(require_text(item, fields.param(name)) for item in items)

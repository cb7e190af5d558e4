"""Content blocks of Anthropic's messages, each checked: they become texts and tool uses."""

from dataclasses import dataclass, field
from typing import Any, Final

from fabric.errors import RejectedError
from fabric.turn.messages import ToolUse
from router.api.billing_line import BILLING_HEADER, without_billing_line
from router.http.fields import Fields, refuse, require_object, require_text
from router.limits import KEY_CHARS_MAX, MESSAGE_NAME_CHARS_MAX

_TTLS_S: Final = {None: 300.0, "5m": 300.0, "1h": 3600.0}


@dataclass(slots=True)
class Notes:
    """Side results of reading content that do not become tokens."""

    ignored: dict[str, None] = field(default_factory=dict)  # without effect; answers tell it
    retain_s: float = 0.0  # the longest of the cache breakpoints

    def ignore(self, name: str) -> None:
        self.ignored[name] = None


def note_cache_control(fields: Fields, notes: Notes) -> None:
    """Read a breakpoint; all that is computed is cached, and this says for how long at least."""
    control = fields.object("cache_control")
    if control is None:
        return
    inner = Fields(control, fields.param("cache_control."))
    if require_text(inner.require("type"), inner.param("type")) != "ephemeral":
        refuse(inner.param("type"), "expected ephemeral")
    ttl = inner.text("ttl")
    if ttl not in _TTLS_S:
        refuse(inner.param("ttl"), "expected 5m or 1h")
    notes.retain_s = max(notes.retain_s, _TTLS_S[ttl])


def blocks(content: Any, param: str, count_max: int) -> list[tuple[str, Fields]]:
    """Return each block's type and fields; a text alone is one block."""
    if isinstance(content, str):
        return [("text", Fields({"text": content}, f"{param}."))]
    if not isinstance(content, list):
        refuse(param, "expected a string or an array of blocks", "invalid_type")
    if len(content) > count_max:
        refuse(param, f"more than {count_max} blocks")
    found = []
    for index, item in enumerate(content):
        fields = Fields(require_object(item, f"{param}[{index}]"), f"{param}[{index}].")
        found.append((require_text(fields.require("type"), fields.param("type")), fields))
    return found


def text_of(fields: Fields, notes: Notes) -> str:
    """Read a block of text."""
    note_cache_control(fields, notes)
    # An empty one is allowed where Anthropic refuses it: answers of local models may be empty.
    return require_text(fields.require("text"), fields.param("text"))


def only_texts(content: Any, param: str, count_max: int, notes: Notes) -> list[str]:
    """Read what may hold text alone."""
    texts = []
    for kind, fields in blocks(content, param, count_max):
        if kind != "text":
            refuse_block(kind, fields)
        texts.append(text_of(fields, notes))
    return texts


def tool_use(fields: Fields, notes: Notes) -> ToolUse:
    """Read a call in an earlier answer."""
    note_cache_control(fields, notes)
    name = require_text(fields.require("name"), fields.param("name"))
    arguments = require_object(fields.require("input"), fields.param("input"))
    call_id = require_text(fields.require("id"), fields.param("id"))
    if len(call_id) > MESSAGE_NAME_CHARS_MAX:
        refuse(fields.param("id"), f"longer than {MESSAGE_NAME_CHARS_MAX} characters")
    return ToolUse(name, arguments, call_id)


def result_id(fields: Fields) -> str:
    """Read which call a result is of."""
    call_id = require_text(fields.require("tool_use_id"), fields.param("tool_use_id"))
    if len(call_id) > KEY_CHARS_MAX:
        refuse(fields.param("tool_use_id"), f"longer than {KEY_CHARS_MAX} characters")
    return call_id


def refuse_block(kind: str, fields: Fields) -> None:
    """Raise the 400 for a block that this server, or this place, does not take."""
    message = (
        f"Unsupported '{fields.param('type')}': a block of {kind[:64]!r} is not taken here; this "
        "server reads text, tool_use, tool_result and thinking, each where it belongs."
    )
    raise RejectedError(message, code="unsupported_content", param=fields.param("type"))


def unbilled(text: str, notes: Notes) -> str:
    """Drop the line with which clients head their system prompt for billing."""
    kept = without_billing_line(text)
    if kept != text:
        notes.ignore(BILLING_HEADER)
    return kept


def joined(texts: list[str]) -> str:
    """Join blocks of one message; Anthropic's clients end theirs without a line break."""
    return "\n".join(text for text in texts if text)

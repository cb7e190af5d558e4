"""What requests of OpenAI's APIs have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

from fabric.limits import RETAIN_S_MAX
from fabric.turn.generation import Identity, Priority
from router.api.adapter import Asked
from router.http.fields import Fields, refuse
from router.http.turn_headers import identify, priority_of
from router.limits import ANSWERS_PER_PROMPT_MAX, KEY_CHARS_MAX

_RETENTIONS_S = {None: 0.0, "in_memory": 0.0, "in-memory": 0.0, "24h": RETAIN_S_MAX}
_TIERS = {
    "auto": Priority.INTERACTIVE,
    "default": Priority.INTERACTIVE,
    "flex": Priority.BACKGROUND,
    "priority": Priority.INTERACTIVE,
    "scale": Priority.INTERACTIVE,
}


@dataclass(frozen=True, slots=True)
class OpenAiRequest(Asked):
    """A checked request of either kind."""

    include_usage: bool  # a stream ends with the counts


def parse_identity(headers: Mapping[str, str], fields: Fields) -> Identity:
    """Read who speaks; what clients put in place of an agent id is checked in any case."""
    metadata = Fields(fields.object("metadata") or {}, fields.param("metadata."))
    keys = [
        fields.text("prompt_cache_key", KEY_CHARS_MAX),
        metadata.text("agent_id", KEY_CHARS_MAX),
        metadata.text("user_id", KEY_CHARS_MAX),
        fields.text("user", KEY_CHARS_MAX),
    ]
    return identify(headers, keys)


def parse_priority(headers: Mapping[str, str], fields: Fields) -> Priority:
    """Read our header, or the service tier, which is checked all the same."""
    tier = fields.text("service_tier")
    if tier is not None and tier not in _TIERS:
        refuse(fields.param("service_tier"), f"expected one of {', '.join(_TIERS)}")
    return priority_of(headers, Priority.INTERACTIVE if tier is None else _TIERS[tier])


def parse_retention_s(fields: Fields) -> float:
    """Read for how long the client says that it will come back."""
    said = fields.text("prompt_cache_retention")
    if said not in _RETENTIONS_S:
        refuse(fields.param("prompt_cache_retention"), "expected in_memory or 24h")
    return _RETENTIONS_S[said]


def parse_stream(fields: Fields) -> tuple[bool, bool]:
    """Read whether to stream, and whether the stream ends with the usage."""
    stream = fields.flag("stream")
    options = Fields(fields.object("stream_options") or {}, "stream_options.")
    include_usage = options.flag("include_usage")
    if not stream and fields.raw("stream_options") is not None:
        refuse("stream_options", "it is only allowed with stream")
    return stream, include_usage


def parse_count(fields: Fields, name: str) -> int | None:
    """Read how many answers to a prompt are wanted."""
    return fields.integer(name, 1, ANSWERS_PER_PROMPT_MAX)

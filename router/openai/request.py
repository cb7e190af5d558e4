"""Fields that requests of OpenAI's APIs have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fabric.limits import RETAIN_S_MAX
from fabric.turn.generation import Identity, Priority
from router.api.adapter import ApiRequest
from router.http.refusals import refuse
from router.http.schema import Flag, Integer, ObjectOf, Text, WordIn, only, optional
from router.http.turn_headers import identify, priority_of
from router.limits import ANSWERS_PER_PROMPT_MAX, KEY_CHARS_MAX

COUNT: Final = Integer(1, ANSWERS_PER_PROMPT_MAX, takes_text=True)  # answers to one prompt
_KEY: Final = Text(KEY_CHARS_MAX)
_RETENTION_S: Final = WordIn(
    {"in_memory": 0.0, "in-memory": 0.0, "24h": RETAIN_S_MAX}, "in_memory or 24h"
)
_TIER: Final = WordIn(
    {
        "auto": Priority.INTERACTIVE,
        "default": Priority.INTERACTIVE,
        "flex": Priority.BACKGROUND,
        "priority": Priority.INTERACTIVE,
        "scale": Priority.INTERACTIVE,
    }
)


@dataclass(frozen=True, slots=True)
class OpenAiRequest(ApiRequest):
    """Checked request for chats or completions."""

    include_usage: bool  # a stream ends with the counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Metadata that can name the agent."""

    agent_id: str | None = optional(_KEY)
    user_id: str | None = optional(_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityBody:
    """Fields that name the agent, and the priority and retention of its turn."""

    user: str | None = optional(_KEY)
    prompt_cache_key: str | None = optional(_KEY)
    metadata: Metadata = optional(ObjectOf(Metadata), Metadata())
    service_tier: Priority = optional(_TIER, Priority.INTERACTIVE)
    # How long the client expects to come back.
    retain_s: float = optional(_RETENTION_S, 0.0, "prompt_cache_retention")

    def identity(self, headers: Mapping[str, str]) -> Identity:
        """Return the header's agent, or the field that clients use for one."""
        metadata = self.metadata
        keys = [self.prompt_cache_key, metadata.agent_id, metadata.user_id, self.user]
        return identify(headers, keys)

    def priority(self, headers: Mapping[str, str]) -> Priority:
        """Return the header's priority, or the service tier's."""
        return priority_of(headers, self.service_tier)


STREAM_OPTIONS: Final = only("include_usage", Flag(), False)


def require_stream(include_usage: bool | None, *, stream: bool) -> None:  # noqa: FBT001 - a field
    """Refuse stream_options in a request that is not streamed."""
    if include_usage is not None and not stream:
        refuse("stream_options", "it is only allowed with stream")

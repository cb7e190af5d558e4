"""Who is speaking: by header, by the client's own keys, or by what is said."""

from collections.abc import Mapping

from fabric.ids import agent_id_from_key, parse_agent_id
from fabric.limits import KEY_CHARS_MAX
from fabric.turn.generation import Identity, IdentityKind
from router.http.fields import Fields

AGENT_HEADER = "x-agent-id"


def identify(headers: Mapping[str, str], fields: Fields) -> Identity:
    """Return the strongest identity that the request carries."""
    named = headers.get(AGENT_HEADER)
    keys = _keys(fields)  # checked even where the header decides
    if named is not None:
        return Identity(IdentityKind.AGENT, parse_agent_id(named))
    for key in keys:
        if key:
            return Identity(IdentityKind.GROUP, agent_id_from_key(key))
    return Identity(IdentityKind.CONTENT)


def _keys(fields: Fields) -> list[str | None]:
    """Read what clients put in place of an agent id, strongest first."""
    metadata = Fields(fields.object("metadata") or {}, fields.param("metadata."))
    return [
        fields.text("prompt_cache_key", KEY_CHARS_MAX),
        metadata.text("agent_id", KEY_CHARS_MAX),
        metadata.text("user_id", KEY_CHARS_MAX),
        fields.text("user", KEY_CHARS_MAX),
    ]

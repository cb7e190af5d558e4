"""Who is speaking: by header, by the client's own keys, or by what is said."""

from collections.abc import Mapping, Sequence

from fabric.ids import agent_id_from_key, parse_agent_id
from fabric.turn.generation import Identity, IdentityKind

AGENT_HEADER = "x-agent-id"


def identify(headers: Mapping[str, str], keys: Sequence[str | None]) -> Identity:
    """Return the strongest identity: the header's, then that of the first key which is one.

    `keys` are what the dialect's clients put in place of an agent id, strongest first.
    """
    named = headers.get(AGENT_HEADER)
    if named is not None:
        return Identity(IdentityKind.AGENT, parse_agent_id(named))
    for key in keys:
        if key:
            return Identity(IdentityKind.GROUP, agent_id_from_key(key))
    return Identity(IdentityKind.CONTENT)

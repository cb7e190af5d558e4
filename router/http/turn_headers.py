"""Headers of a turn: its agent, its priority, the agents whose turns come next, what is ignored."""

from collections.abc import Iterable, Mapping, Sequence

from fabric.ids import AgentId, agent_id_from_key, parse_agent_id
from fabric.turn.generation import Identity, IdentityKind, Priority
from router.http.refusals import refuse
from router.limits import (
    IGNORED_HEADER_CHARS_MAX,
    IGNORED_NAME_CHARS_MAX,
    KEY_CHARS_MAX,
    PREFETCH_HINTS_MAX,
)

AGENT_HEADER = "x-agent-id"
# Sessions of coding agents, the parent's first: Claude Code, Codex, opencode, Crush.
SESSION_HEADERS = (
    "x-parent-session-id",
    "x-codex-parent-thread-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-opencode-session",
    "x-session-id",
    "x-session-affinity",
    "thread-id",
    "conversation_id",
)
SUB_AGENT_HEADER = "x-claude-code-agent-id"
IGNORED_HEADER = "x-macfabric-ignored"
PREFETCH_HEADER = "x-macfabric-prefetch"
PRIORITY_HEADER = "x-macfabric-priority"


def identify(headers: Mapping[str, str], keys: Sequence[str | None]) -> Identity:
    """Return the strongest identity: the header's agent, then the first key that is set.

    `keys` are the fields that the dialect's clients use for an agent, strongest first.
    """
    named = headers.get(AGENT_HEADER)
    if named is not None:
        return Identity(IdentityKind.AGENT, parse_agent_id(named))
    for key in keys:
        if key:
            return Identity(IdentityKind.GROUP, agent_id_from_key(key))
    return Identity(IdentityKind.CONTENT)


def session_of(headers: Mapping[str, str]) -> AgentId | None:
    """Return the session of a coding agent and its sub-agents, a hint; None for too long ones."""
    named = (headers.get(name, "").strip() for name in SESSION_HEADERS)
    return _hint(next((key for key in named if key), ""))


def sub_agent_of(headers: Mapping[str, str]) -> AgentId | None:
    """Return the sub-agent of a coding agent, a hint; None for too long names."""
    return _hint(headers.get(SUB_AGENT_HEADER, "").strip())


def _hint(key: str) -> AgentId | None:
    return agent_id_from_key(key) if 0 < len(key) <= KEY_CHARS_MAX else None


def priority_of(headers: Mapping[str, str], default: Priority) -> Priority:
    """Return the priority of the header, or the body's."""
    named = headers.get(PRIORITY_HEADER)
    if named is None:
        return default
    try:
        return Priority(named.strip().lower())
    except ValueError:
        refuse(PRIORITY_HEADER, f"expected one of {', '.join(Priority)}")


def expected_next(headers: Mapping[str, str]) -> tuple[AgentId, ...]:
    """Return the agents to prefetch; raise RejectedError for invalid ids or too many."""
    named = headers.get(PREFETCH_HEADER, "")
    agents = tuple(dict.fromkeys(part.strip() for part in named.split(",") if part.strip()))
    if len(agents) > PREFETCH_HINTS_MAX:
        refuse(PREFETCH_HEADER, f"more than {PREFETCH_HINTS_MAX} agents")
    return tuple(parse_agent_id(agent) for agent in agents)


def header_word(word: str) -> str:
    """Return a client's word as a header of the answer can carry it, cut to a limit."""
    cut = word[:IGNORED_NAME_CHARS_MAX]
    return "".join(c if c.isascii() and c.isprintable() and c != "," else "?" for c in cut)


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Return the header that lists parameters without effect, cut to a limit; empty if none."""
    unique = list(dict.fromkeys(names))
    shown_count, chars = 0, 0
    for name in unique:
        chars += len(name) + len(", ")
        if chars > IGNORED_HEADER_CHARS_MAX:
            break
        shown_count += 1
    shown = unique[:shown_count]
    if shown_count < len(unique):
        shown.append(f"and {len(unique) - shown_count} more")
    return {IGNORED_HEADER: ", ".join(shown)} if shown else {}

"""Edits and settings of an agent's memory, as JSON: sizes and digests, and never a text."""

from typing import Any, Final

from fabric.control.directive_calls import MemoryView
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId
from fabric.record.agent_settings import AgentSettings
from router.admin.views.shape import AnswerShape, Row
from router.api.description import one_of

SETTINGS_TYPES: Final[dict[str, Any]] = {
    "rebuilds": bool,
    "closed": bool,
    "decays_after_s": float | None,
    "share": one_of("tenant", "agent"),
}
AGENT_DIRECTIVES: Final = AnswerShape(
    AgentView,
    "agent.directives",
    "node",
    "directives",
    id="agent",
    beside={"operation": str | None},
)
MEMORY: Final = AnswerShape(
    MemoryView,
    "agent.memory",
    "tokens",
    "messages",
    "directives",
    "undone",
    beside={"id": AgentId, "node": str},
)
REBUILD: Final = AnswerShape(
    AgentView, "agent.rebuild", "node", "exact_tokens", id="agent", beside={"rebuilds": bool}
)
AGENT_SETTINGS: Final = AnswerShape(
    AgentView, "agent.wishes", "node", "tiers", "pinned", id="agent", beside=SETTINGS_TYPES
)


def settings_row(view: AgentView) -> Row:
    """Show what clients set for an agent as a whole."""
    settings = view.settings or AgentSettings()
    return {
        "rebuilds": settings.rebuilds,
        "closed": settings.is_closed,
        "decays_after_s": settings.decays_after_s,
        "share": "agent" if settings.is_private else "tenant",
    }


def agent_settings_row(view: AgentView) -> Row:
    """Show the same, and which tiers hold the agent's memory."""
    return AGENT_SETTINGS.row(view, **settings_row(view))


def rebuild_row(view: AgentView) -> Row:
    """Show whether an agent's next turn computes its memory anew, and from which token on."""
    return REBUILD.row(view, rebuilds=view.settings is not None and view.settings.rebuilds)

"""What was done to an agent's memory, as JSON: sizes and digests, and never a text."""

from fabric.codec import to_plain
from fabric.control.directive_calls import MemoryView
from fabric.control.node_calls import AgentView
from fabric.ids import AgentId, NodeName, OperationId
from fabric.record.agent_settings import AgentSettings
from router.admin.views.row import Row


def directives_row(view: AgentView, operation: OperationId | None) -> Row:
    """Show the directives that an agent has now."""
    return {
        "id": view.agent,
        "object": "agent.directives",
        "node": view.node,
        "operation": operation,
        "directives": to_plain(view.directives),
    }


def memory_row(agent: AgentId, node: NodeName, view: MemoryView) -> Row:
    """Show what can be named in an agent's memory, and what is and was done to it."""
    return {"id": agent, "object": "agent.memory", "node": node, **to_plain(view)}


def rebuild_row(view: AgentView) -> Row:
    """Show whether an agent's next turn computes its memory anew, and behind which token."""
    return {
        "id": view.agent,
        "object": "agent.rebuild",
        "node": view.node,
        "rebuilds": view.settings is not None and view.settings.rebuilds,
        "exact_tokens": view.exact_tokens,
    }


def wishes_row(view: AgentView) -> Row:
    """Show what is said of an agent as a whole, and what its memory is on."""
    return {
        "id": view.agent,
        "object": "agent.wishes",
        "node": view.node,
        "tiers": list(view.tiers),
        "pinned": view.pinned,
        **wished(view),
    }


def wished(view: AgentView | None) -> Row:
    """Show what was said of an agent as a whole."""
    settings = (view.settings if view else None) or AgentSettings()
    return {
        "rebuilds": settings.rebuilds,
        "closed": settings.is_closed,
        "decays_after_s": settings.decays_after_s,
        "share": "agent" if settings.is_private else "tenant",
    }

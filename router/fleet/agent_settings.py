"""Comparison of an agent's settings and directives between its owner and its replicas."""

from dataclasses import replace

from fabric.control.node_calls import AgentView
from fabric.edit_mode import EditMode


def settings_fingerprint(view: AgentView) -> object:
    """Return an agent's settings and directives, whether or not its memory reflects them yet."""
    directives = tuple(replace(d, is_applied=False, message=None) for d in view.directives)
    return view.settings, directives


def applied_forgets(view: AgentView) -> frozenset[object]:
    """Return the directives to forget a message that an agent's memory reflects already."""
    return frozenset(
        replace(directive, message=None, dropped_chars=None, dropped_digest=None)
        for directive in view.directives
        if directive.mode is EditMode.FORGET and directive.is_applied
    )

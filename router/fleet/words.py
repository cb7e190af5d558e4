"""What was said of an agent, by which an owner and a copy are compared."""

from dataclasses import replace

from fabric.control.node_calls import AgentView
from fabric.edit_mode import EditMode


def words_of(view: AgentView) -> object:
    """Return what was said of an agent; whether its memory reflects that yet is another matter."""
    told = tuple(replace(each, is_applied=False, message=None) for each in view.directives)
    return view.wishes, told


def forgotten_by(view: AgentView) -> frozenset[object]:
    """Return which directives to forget a message an agent's memory reflects."""
    return frozenset(
        replace(each, message=None, dropped_chars=None, dropped_digest=None)
        for each in view.directives
        if each.mode is EditMode.FORGET and each.is_applied
    )

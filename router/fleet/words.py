"""What was said of an agent, by which an owner and a copy are compared."""

from dataclasses import replace

from fabric.control.node_calls import AgentView


def words_of(view: AgentView) -> object:
    """Return what was said of an agent; whether its memory reflects that yet is another matter."""
    told = tuple(replace(each, is_applied=False, message=None) for each in view.directives)
    return view.wishes, told

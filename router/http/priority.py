"""How urgent a request is: our header, or what the dialect says of it."""

from collections.abc import Mapping

from fabric.turn.generation import Priority
from router.http.fields import refuse

PRIORITY_HEADER = "x-macfabric-priority"


def priority_of(headers: Mapping[str, str], said: Priority) -> Priority:
    """Read the priority; the header outranks what was said otherwise."""
    named = headers.get(PRIORITY_HEADER)
    if named is None:
        return said
    try:
        return Priority(named.strip().lower())
    except ValueError:
        refuse(PRIORITY_HEADER, f"expected one of {', '.join(Priority)}")

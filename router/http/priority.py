"""How urgent a request is: our header, or OpenAI's service tier."""

from collections.abc import Mapping

from fabric.turn.generation import Priority
from router.http.fields import Fields, refuse

PRIORITY_HEADER = "x-macfabric-priority"
_TIERS = {
    "auto": Priority.INTERACTIVE,
    "default": Priority.INTERACTIVE,
    "flex": Priority.BACKGROUND,
    "priority": Priority.INTERACTIVE,
    "scale": Priority.INTERACTIVE,
}


def priority_of(headers: Mapping[str, str], fields: Fields) -> Priority:
    """Read the priority; the header outranks `service_tier`, which is checked all the same."""
    tier = fields.text("service_tier")
    if tier is not None and tier not in _TIERS:
        refuse(fields.param("service_tier"), f"expected one of {', '.join(_TIERS)}")
    named = headers.get(PRIORITY_HEADER)
    if named is None:
        return Priority.INTERACTIVE if tier is None else _TIERS[tier]
    try:
        return Priority(named.strip().lower())
    except ValueError:
        refuse(PRIORITY_HEADER, f"expected one of {', '.join(Priority)}")

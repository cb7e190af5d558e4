"""Whose turn is expected after this one: a hint that loads their memory meanwhile."""

from collections.abc import Mapping

from fabric.ids import AgentId, parse_agent_id
from fabric.limits import PREFETCH_HINTS_MAX
from router.http.fields import refuse

PREFETCH_HEADER = "x-macfabric-prefetch"


def expected_next(headers: Mapping[str, str]) -> tuple[AgentId, ...]:
    """Read agent ids separated by commas; raise RejectedError for what is none, or too many."""
    named = headers.get(PREFETCH_HEADER, "")
    agents = tuple(dict.fromkeys(part.strip() for part in named.split(",") if part.strip()))
    if len(agents) > PREFETCH_HINTS_MAX:
        refuse(PREFETCH_HEADER, f"more than {PREFETCH_HINTS_MAX} agents")
    return tuple(parse_agent_id(agent) for agent in agents)

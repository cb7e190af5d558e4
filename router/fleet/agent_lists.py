"""Read a node's list of agents: what changed since the last one, part by part."""

from dataclasses import replace

from fabric.control.agent_at import AgentName
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.errors import FabricError
from router.fleet.node_client import NodeLink
from router.limits import LIST_PAGES_MAX


async def read_list(link: NodeLink, known: tuple[int, int] = (0, 0)) -> AgentList:
    """Return what is new after `known` (incarnation, changes), or all; raise FabricError."""
    first = last = await _part(link, *known)
    agents = _by_name(first)
    gone = dict.fromkeys(first.gone)
    for _ in range(LIST_PAGES_MAX):
        if not last.more:
            kept = tuple(agents.values())
            return replace(first, changes=last.changes, agents=kept, gone=tuple(gone), more=False)
        last = await _part(link, last.incarnation, last.changes)
        if last.incarnation != first.incarnation or not last.since:
            break  # it began anew
        for name in last.gone:
            agents.pop(name, None)
            gone[name] = None
        for name, item in _by_name(last).items():
            agents.pop(name, None)
            agents[name] = item
            gone.pop(name, None)
    message = f"{link.name} does not come to the end of its list"
    raise FabricError(message, code="bad_node_answer")


async def _part(link: NodeLink, incarnation: int, since: int) -> AgentList:
    return await link.call(ListAgents(incarnation, since), AgentList)


def _by_name(part: AgentList) -> dict[AgentName, AgentSketch]:
    return {AgentName(*item.view.key): item for item in part.agents}

"""Lists of agents: read from a node part by part, and applied to the directory and the sketches."""

from dataclasses import replace

from fabric.control.agent_at import AgentName
from fabric.control.node_calls import AgentList, AgentSketch, ListAgents
from fabric.errors import FabricError
from fabric.ids import NodeName
from router.fleet.directory import Directory
from router.fleet.node_client import NodeLink
from router.limits import LIST_PAGES_MAX
from router.placement.sketch_index import SketchIndex


class AgentReports:
    """Updates of the directory and the sketches by the lists that nodes send."""

    def __init__(self, directory: Directory, sketches: SketchIndex) -> None:
        self._directory = directory
        self._sketches = sketches

    def on_list(self, agents: AgentList, requested_s: float) -> None:
        """Apply a node's list, requested at `requested_s` by the router's clock."""
        for tenant, agent in self._directory.apply(agents, requested_s):
            self._sketches.remove(tenant, agents.node, agent)
        for item in agents.agents:
            view = item.view
            tag = (agents.incarnation, view.epoch, view.revision)
            if view.epoch <= self._directory.floor(view.key):
                continue  # erased, but not removed yet: no conversation continues it
            if item.sketch:  # missing while the first turn runs, which was sketched when sent
                self._sketches.put(
                    view.tenant, agents.node, view.agent, item.sketch, tag, form=item.form
                )

    def needs_whole_list(self, node: NodeName) -> bool:
        """Return whether a node's whole list is needed."""
        return self._directory.needs_whole_list(node)

    def on_restart(self, node: NodeName) -> None:
        """Accept lists of a node's new incarnation, whose change counter starts anew."""
        self._directory.restart(node)


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
            break  # the node restarted its list
        for name in last.gone:
            agents.pop(name, None)
            gone[name] = None
        for name, item in _by_name(last).items():
            agents.pop(name, None)
            agents[name] = item
            gone.pop(name, None)
    message = f"the list of {link.name} has no end"
    raise FabricError(message, code="bad_node_answer")


async def _part(link: NodeLink, incarnation: int, since: int) -> AgentList:
    return await link.call(ListAgents(incarnation, since), AgentList)


def _by_name(part: AgentList) -> dict[AgentName, AgentSketch]:
    return {AgentName(*item.view.key): item for item in part.agents}

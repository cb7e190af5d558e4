"""Placement hints: the node that an agent should move to, given the owners of all agents."""

from collections.abc import Callable, Collection, Sequence

from fabric.ids import AgentId
from router.scenario.fabric_client import FabricClient
from router.scenario.scenario import PlaceHint, Scenario


async def preferred_node(
    scenario: Scenario, agent: str, client: FabricClient, id_of: Callable[[str], AgentId]
) -> str | None:
    """Return the node that an agent should move to, or be created on; None: do not move it."""
    place = scenario.agents[agent].place
    if place is None:
        return None
    nodes = await client.nodes()
    others = [id_of(other) for other in (*(place.apart_from or ()), *(place.together_with or ()))]
    owners = await client.owners([id_of(agent), *others])
    near = [owners[other] for other in others if other in owners]
    return choose_node(place, nodes, owners.get(id_of(agent)), near)


def choose_node(
    place: PlaceHint, nodes: Collection[str], current: str | None, others: Sequence[str]
) -> str | None:
    """Return the node for an agent on `current`; `others` are the nodes of the named agents."""
    if place.node is not None:
        candidates = [place.node]
    elif place.together_with is not None:
        candidates = list(others)
    else:
        candidates = [node for node in nodes if node not in others]
        if current is not None and current not in others:
            return None
    if current in candidates:
        return None
    return next((node for node in candidates if node in nodes), None)

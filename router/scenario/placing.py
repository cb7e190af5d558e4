"""Where an agent should move, given where it and others are now."""

from collections.abc import Callable, Collection, Sequence

from fabric.ids import AgentId
from router.scenario.scenario import PlaceHint, Scenario
from router.scenario.speaker import ScenarioSpeaker


async def wished_node(
    scenario: Scenario, agent: str, speaker: ScenarioSpeaker, id_of: Callable[[str], AgentId]
) -> str | None:
    """Name the node that an agent should move to, or be created on; None: leave it alone."""
    place = scenario.agents[agent].place
    if place is None:
        return None
    nodes = await speaker.nodes()
    others = [id_of(other) for other in (*(place.apart_from or ()), *(place.together_with or ()))]
    owners = await speaker.owners([id_of(agent), *others])
    near = [owners[other] for other in others if other in owners]
    return choose_node(place, nodes, owners.get(id_of(agent)), near)


def choose_node(
    place: PlaceHint, nodes: Collection[str], current: str | None, others: Sequence[str]
) -> str | None:
    """Choose a node for an agent on `current`; `others` are the nodes of the agents it names."""
    if place.node is not None:
        wanted = [place.node]
    elif place.together_with is not None:
        wanted = list(others)
    else:
        wanted = [node for node in nodes if node not in others]
        if current is not None and current not in others:
            return None
    if current in wanted:
        return None
    return next((node for node in wanted if node in nodes), None)

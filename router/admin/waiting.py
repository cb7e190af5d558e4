"""Routes whose requests wait until the node or agent in their path is found and reachable."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response

from router.admin.turns import PATH as TURNS
from router.fleet.node_discovery import NodeDiscovery
from router.http.auth import agent_key, shown_agent_key
from router.moves.lost_owners import LostOwners

NODES = "/v1/nodes"  # shows the nodes that have joined or are joining

Endpoint = Callable[[Request], Awaitable[Response]]

# These need no answer from the agent's owner: a view of what is known, an erasure on every node, a
# file that replaces the agent.
_OWNERLESS = frozenset(
    {("GET", "/v1/agents/{agent}"), ("DELETE", "/v1/agents/{agent}")}
    | {("POST", "/v1/agents/{agent}/resume")}
)


def waiting(
    routes: Sequence[Route], discovery: NodeDiscovery, lost_owners: LostOwners
) -> list[Route]:
    """Make requests of these routes wait for nodes that a new router has not contacted.

    If the agent's owner is lost, a replica takes over before the request is answered.
    """
    for route in routes:
        route.app = request_response(
            _with_waits(route.endpoint, route.path, discovery, lost_owners)
        )
    return list(routes)


def _with_waits(
    endpoint: Endpoint, path: str, discovery: NodeDiscovery, lost_owners: LostOwners
) -> Endpoint:
    async def answer(request: Request) -> Response:
        names = request.path_params
        if "node" in names:
            await discovery.wait_for_node(names["node"])
        elif request.scope["path"] == NODES:
            await discovery.wait_for_roster()
        else:
            await discovery.wait_for_reports()
        if "agent" not in names or (request.method, path) in _OWNERLESS:
            return await endpoint(request)
        key = shown_agent_key(request) if path == TURNS else agent_key(request)
        async with lost_owners.calling_owner(key):
            return await endpoint(request)

    return answer

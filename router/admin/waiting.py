"""Routes whose requests wait until what their path names can be known, and reached."""

from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, request_response

from router.fleet.node_discovery import NodeDiscovery
from router.http.auth import agent_key
from router.moves.lost_owners import LostOwners

NODES = "/v1/nodes"  # shows who is there now, and who is joining

Endpoint = Callable[[Request], Awaitable[Response]]

# These need no answer of the agent's owner: a view of what is known, an erasure on every node, a
# file that replaces what there is.
_OWNERLESS = frozenset(
    {("GET", "/v1/agents/{agent}"), ("DELETE", "/v1/agents/{agent}")}
    | {("POST", "/v1/agents/{agent}/resume")}
)


def waiting(
    routes: Sequence[Route], discovery: NodeDiscovery, lost_owners: LostOwners
) -> list[Route]:
    """Let requests of these routes wait for the nodes that a new router has not met.

    Those that an agent's owner must answer are served by a replica where the owner is lost.
    """
    for route in routes:
        route.app = request_response(_met(route.endpoint, route.path, discovery, lost_owners))
    return list(routes)


def _met(
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
        async with lost_owners.served(agent_key(request)):
            return await endpoint(request)

    return answer

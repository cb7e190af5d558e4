"""POST drain and undrain, for operators: empty a node, and let it take agents again."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from router.admin.views.nodes import drain_row
from router.fleet.fleet import Fleet
from router.http.auth import caller_of, require_operator
from router.moves.drains import Drains, DrainState


class DrainApi:
    """Starts and ends drains; GET /v1/nodes shows how they go."""

    def __init__(self, fleet: Fleet, drains: Drains) -> None:
        self._fleet = fleet
        self._drains = drains

    def routes(self) -> list[Route]:
        return [
            Route("/v1/nodes/{node}/drain", self.drain, methods=["POST"]),
            Route("/v1/nodes/{node}/undrain", self.undrain, methods=["POST"]),
        ]

    async def drain(self, request: Request) -> Response:
        """Begin, or go on; answers at once: 202 while agents are left, 200 when none is."""
        require_operator(request)
        node = self._fleet.require_node(request.path_params["node"], param="node")
        drain = await self._drains.start(node)
        status = 200 if drain.state is DrainState.DRAINED else 202
        return JSONResponse(drain_row(self._drains, node, caller_of(request)), status)

    async def undrain(self, request: Request) -> Response:
        """Let the node take agents; what is on the move arrives."""
        require_operator(request)
        node = self._fleet.require_node(request.path_params["node"], param="node")
        await self._drains.stop(node)
        return JSONResponse({"node": node, "object": "node.drain", "state": "ready"})

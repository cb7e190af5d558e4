"""Routes that list nodes and, for operators, flush and drain them."""

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.node_calls import Done, Flush
from router.admin.views.nodes import drain_row, node_rows
from router.fleet.fleet import Fleet
from router.http.auth import caller_of, require_operator, tenant_of
from router.http.json_body import read_body
from router.http.schema import Flag, only
from router.moves.drains import Drains, DrainState

FLUSH_BODY: Final = only("drop_hot", Flag(), False, is_strict=True)


class NodesApi:
    """Nodes as of their last heartbeats, and their drains."""

    def __init__(self, fleet: Fleet, drains: Drains) -> None:
        self._fleet = fleet
        self._drains = drains

    def routes(self) -> list[Route]:
        return [
            Route("/v1/nodes", self.index, methods=["GET"]),
            Route("/v1/nodes/{node}/flush", self.flush, methods=["POST"]),
            Route("/v1/nodes/{node}/drain", self.drain, methods=["POST"]),
            Route("/v1/nodes/{node}/undrain", self.undrain, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List all nodes, including lost ones; a tenant sees only its own data on them."""
        caller = caller_of(request)
        if caller.operator is None:
            tenant_of(request)  # raises for callers with neither key
        await self._fleet.membership.refresh(relist=caller.operator is None)
        rows = node_rows(self._fleet, self._drains, caller)
        return JSONResponse({"object": "list", "data": rows})

    async def flush(self, request: Request) -> Response:
        """Save every agent of a node and, with `drop_hot`, drop their caches in RAM."""
        require_operator(request)
        name = self._fleet.require_node(request.path_params["node"])
        call = Flush(drop_hot=await read_body(request, FLUSH_BODY, may_be_absent=True))
        done = await self._fleet.link(name).call(call, Done)
        return JSONResponse({"node": name, "detail": done.detail})

    async def drain(self, request: Request) -> Response:
        """Start or continue a drain; answer at once: 202 while agents are left, then 200."""
        require_operator(request)
        node = self._fleet.require_node(request.path_params["node"], param="node")
        drain = await self._drains.start(node)
        status = 200 if drain.state is DrainState.DRAINED else 202
        return JSONResponse(drain_row(self._drains, node, caller_of(request)), status)

    async def undrain(self, request: Request) -> Response:
        """End a drain; moves under way are completed."""
        require_operator(request)
        node = self._fleet.require_node(request.path_params["node"], param="node")
        await self._drains.stop(node)
        return JSONResponse({"node": node, "object": "node.drain", "state": "ready"})

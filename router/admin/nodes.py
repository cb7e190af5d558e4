"""GET /v1/nodes: the fleet, in full for operators; and flush, for operators and tests."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.node_calls import Done, Flush
from router.admin.views.nodes import node_rows
from router.fleet.fleet import Fleet
from router.http.auth import caller_of, require_operator, tenant_of
from router.http.fields import Fields
from router.http.json_body import read_object
from router.moves.drains import Drains


class NodesApi:
    """Nodes as their last heartbeat described them."""

    def __init__(self, fleet: Fleet, drains: Drains) -> None:
        self._fleet = fleet
        self._drains = drains

    def routes(self) -> list[Route]:
        return [
            Route("/v1/nodes", self.index, methods=["GET"]),
            Route("/v1/nodes/{node}/flush", self.flush, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List all nodes, lost ones included; to tenants without what others have there."""
        caller = caller_of(request)
        if caller.operator is None:
            tenant_of(request)  # or nobody
        await self._fleet.membership.refresh(relist=caller.operator is None)
        rows = node_rows(self._fleet, self._drains, caller)
        return JSONResponse({"object": "list", "data": rows})

    async def flush(self, request: Request) -> Response:
        """Make every agent of a node durable and, with `drop_hot`, cool them all."""
        require_operator(request)
        name = self._fleet.require_node(request.path_params["node"])
        fields = Fields(await read_object(request, may_be_absent=True))
        fields.allow_only("drop_hot")
        call = Flush(drop_hot=fields.flag("drop_hot"))
        done = await self._fleet.link(name).call(call, Done)
        return JSONResponse({"node": name, "detail": done.detail})

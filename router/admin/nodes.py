"""Routes that list nodes and, for operators, flush, drain and restart them."""

from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.calls import UNKNOWN_CALL, spec_of
from fabric.control.node_calls import Done, Flush, Restart
from fabric.errors import ConflictError, RejectedError
from fabric.limits import NODES_MAX
from router.admin.router import RESTART_BODY
from router.admin.views.nodes import drain_row, node_rows
from router.fleet.fleet import Fleet
from router.http.auth import caller_of, require_operator, tenant_of
from router.http.json_body import read_body
from router.http.paging import page_of, page_response
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
            Route("/v1/nodes/{node}/restart", self.restart, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List nodes, including lost ones, a page at a time; a tenant sees only its own data."""
        caller = caller_of(request)
        if caller.operator is None:
            tenant_of(request)  # raises for callers with neither key
        page, state = page_of(request.query_params, NODES_MAX), request.query_params.get("state")
        await self._fleet.membership.refresh(relist=caller.operator is None)
        rows = node_rows(self._fleet, self._drains, caller)
        rows = [row for row in rows if state is None or row["state"] == state]
        shown, has_more = page.cut(rows, lambda row: str(row["name"]))
        last = str(shown[-1]["name"]) if shown else None
        return JSONResponse(page_response(shown, last, has_more=has_more))

    async def flush(self, request: Request) -> Response:
        """Save every agent of a node and, with `drop_hot`, drop their caches in RAM."""
        require_operator(request)
        name = self._fleet.require_node(request.path_params["node"])
        call = Flush(drop_hot=await read_body(request, FLUSH_BODY, may_be_absent=True))
        reply = await self._fleet.link(name).call(call, Done)
        return JSONResponse({"node": name, "detail": reply.detail})

    async def restart(self, request: Request) -> Response:
        """Save every agent of a node and restart its process, once running turns have ended."""
        require_operator(request)
        wait_s = await read_body(request, RESTART_BODY)
        name = self._fleet.require_node(request.path_params["node"], param="node")
        member = self._fleet.membership.find(name)
        before = member.view.incarnation if member and member.view else None
        try:
            limit_s = spec_of(Restart).timeout_s + wait_s
            reply = await self._fleet.link(name).call(Restart(wait_s), Done, limit_s)
        except RejectedError as error:
            if error.code != UNKNOWN_CALL:
                raise
            message = f"node {name} runs a version that cannot restart itself: use `down` and `up`"
            raise ConflictError(message, code="cannot_restart") from None
        row = {"node": name, "object": "node.restart", "incarnation": before}
        return JSONResponse(row | {"detail": reply.detail}, 202)

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

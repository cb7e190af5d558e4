"""POST drain and undrain, for operators: empty a node, and let it take agents again."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.ids import NodeName
from fabric.limits import DRAIN_STUCK_MAX
from router.fleet.fleet import Fleet
from router.http.auth import Principal, caller_of, require_operator
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


def drain_row(drains: Drains, node: NodeName, caller: Principal) -> dict[str, Any] | None:
    """Spell a node's drain: the names of a tenant's own agents, and for operators the counts."""
    drain = drains.find(node)
    if drain is None:
        return None
    own = [(key[1], drain.stuck[key]) for key in sorted(drain.stuck) if key[0] == caller.tenant]
    row = {
        "node": node,
        "object": "node.drain",
        "state": drain.state.value,
        "stuck": [
            {"id": agent, "code": why.code, "message": why.message}
            for agent, why in own[:DRAIN_STUCK_MAX]
        ],
    }
    if caller.operator is None:
        return row
    return row | {
        "agents_moved": drain.moved_count,
        "agents_left": drain.left_count,
        "bytes_sent": drain.sent_bytes,
        "seconds": drains.seconds(drain),
        "stuck_others": len(drain.stuck) - len(own[:DRAIN_STUCK_MAX]),
    }

"""GET /v1/nodes: the fleet; and flush, for operators and tests."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import to_plain
from fabric.control import Done, Flush
from router.auth import tenant_of
from router.drain_api import drain_row
from router.drains import Drains
from router.fields import Fields
from router.fleet import Fleet
from router.json_body import read_object
from router.membership import Health, Member

FLUSH_TIMEOUT_S = 120.0


class NodesApi:
    """Nodes as their last beat described them."""

    def __init__(self, fleet: Fleet, drains: Drains) -> None:
        self._fleet = fleet
        self._drains = drains

    def routes(self) -> list[Route]:
        """Return the routes of this API."""
        return [
            Route("/v1/nodes", self.index, methods=["GET"]),
            Route("/v1/nodes/{node}/flush", self.flush, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List all nodes, lost ones included."""
        membership = self._fleet.membership
        await membership.refresh()
        tenant = tenant_of(request)
        nodes = [
            self._node(m, membership.health(m.name))
            | {"drain": drain_row(self._drains, m.name, tenant)}
            for m in membership.members
        ]
        return JSONResponse({"object": "list", "data": nodes})

    async def flush(self, request: Request) -> Response:
        """Make every agent of a node durable and, with `drop_hot`, cool them all."""
        name = self._fleet.require_node(request.path_params["node"])
        has_body = bool(await request.body())
        fields = Fields(await read_object(request) if has_body else {})
        call = Flush(drop_hot=fields.flag("drop_hot"))
        done = await self._fleet.link(name).call(call, Done, FLUSH_TIMEOUT_S)
        return JSONResponse({"node": name, "detail": done.detail})

    def _node(self, member: Member, health: Health) -> dict[str, Any]:
        view = member.view
        if view is None:
            return {"name": member.name, "state": _state(member, health)}
        return {
            "name": member.name,
            "host": view.host,
            "pid": view.pid,
            "state": _state(member, health),
            "health": health.value,
            "model": view.model,
            "fingerprint": view.fingerprint,
            "context_tokens_max": view.context_tokens_max,
            "agents": view.agents,
            "tokens": view.tokens,
            "bytes": to_plain(view.bytes),
            "free": to_plain(view.free),
            "bytes_per_token": view.bytes_per_token,
            "addresses": to_plain(view.addresses),
            "links": to_plain(view.links),
            "epoch": self._fleet.directory.epoch_of(member.name),
            "incarnation": view.incarnation,
            "active": view.active,
            "waiting": view.waiting,
            "queue_s": view.queue_s,
            "prefill_tokens_per_s": view.prefill_tokens_per_s,
            "decode_tokens_per_s": view.decode_tokens_per_s,
            "self_test": to_plain(view.self_test),
            "degraded": view.degraded,
            "evicted_agents": view.evicted_agents,
            "reuse": view.reuse,
            "scrubbed_bytes": view.scrubbed_bytes,
            "damaged_blocks": view.damaged_blocks,
        }


def _state(member: Member, health: Health) -> str:
    if health is not Health.ALIVE:
        return health.value
    return member.view.state if member.view else "joining"

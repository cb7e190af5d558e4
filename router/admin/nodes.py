"""GET /v1/nodes: the fleet, in full for operators; and flush, for operators and tests."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.codec import to_plain
from fabric.control.node_calls import AgentView, Done, Flush
from fabric.ids import NodeName, TenantId
from router.admin.drain import drain_row
from router.fleet.fleet import Fleet
from router.fleet.membership import LeaseState, Member
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
        membership, caller = self._fleet.membership, caller_of(request)
        is_operator = caller.operator is not None
        await membership.refresh(relist=not is_operator)
        held = {} if is_operator else self._held(tenant_of(request))
        nodes = [
            self._node(m, membership.health(m.name), None if is_operator else held.get(m.name, ()))
            | {"drain": drain_row(self._drains, m.name, caller)}
            for m in membership.members
        ]
        return JSONResponse({"object": "list", "data": nodes})

    async def flush(self, request: Request) -> Response:
        """Make every agent of a node durable and, with `drop_hot`, cool them all."""
        require_operator(request)
        name = self._fleet.require_node(request.path_params["node"])
        fields = Fields(await read_object(request, may_be_absent=True))
        call = Flush(drop_hot=fields.flag("drop_hot"))
        done = await self._fleet.link(name).call(call, Done)
        return JSONResponse({"node": name, "detail": done.detail})

    def _held(self, tenant: TenantId) -> dict[NodeName, list[AgentView]]:
        """Return what a tenant's agents have on each node."""
        directory, held = self._fleet.directory, dict[NodeName, list[AgentView]]()
        for agent in directory.agents(tenant):
            for holding in directory.holdings((tenant, agent)):
                if holding.view is not None:
                    held.setdefault(holding.node, []).append(holding.view)
        return held

    def _node(
        self, member: Member, health: LeaseState, own: Sequence[AgentView] | None
    ) -> dict[str, Any]:
        """Spell a node for an operator, or for a tenant with its `own` agents there."""
        view = member.view
        failure = self._failure(member) if own is None else {}
        if view is None:
            return {"name": member.name, "state": _state(member, health)} | failure
        if own is not None:
            return {
                "name": member.name,
                "state": _state(member, health),
                "health": health.value,
                "model": view.model,
                "fingerprint": view.fingerprint,
                "context_tokens_max": view.context_tokens_max,
                "prompt_bytes_max": view.prompt_bytes_max,
                "agents": len(own),
                "tokens": sum(each.tokens for each in own),
                "bytes": {
                    "hot": sum(each.bytes.hot for each in own),
                    "disk": sum(each.bytes.disk for each in own),
                },
            }
        return {
            "name": member.name,
            "host": view.host,
            "pid": view.pid,
            "state": _state(member, health),
            "health": health.value,
            **failure,
            "model": view.model,
            "fingerprint": view.fingerprint,
            "context_tokens_max": view.context_tokens_max,
            "prompt_bytes_max": view.prompt_bytes_max,
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

    def _failure(self, member: Member) -> dict[str, Any]:
        if member.failure is None:
            return {}
        left_s = max(0.0, member.failure.again_s - self._fleet.clock.monotonic_s())
        return {"failure": member.failure.message, "starts_again_in_s": round(left_s, 1)}


def _state(member: Member, health: LeaseState) -> str:
    if member.failure is not None:
        return "failed"
    if health is not LeaseState.ALIVE:
        return health.value
    return member.view.state if member.view else "joining"

"""GET, DELETE, pin and migrate for agents; each tenant sees its own."""

from collections.abc import Sequence
from typing import Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fabric.control.node_calls import PinAgent
from fabric.ids import AgentId, TenantId
from router.admin.views.agents import agent_row, erasure_row, pin_row
from router.admin.views.moves import migration_row
from router.fleet.fleet import Fleet
from router.http.auth import agent_key, tenant_of
from router.http.fields import Fields, query_flag, require_text
from router.http.json_body import read_object
from router.moves.erasures import Erasures
from router.moves.move_registry import MoveRegistry


class QuotingRuns(Protocol):
    """The stored runs of scenarios, whose journals quote the agents that took part."""

    async def quoting(self, tenant: TenantId, agent: AgentId) -> Sequence[str]:
        """Name the runs that quote an agent."""
        ...

    async def forget_quoting(self, tenant: TenantId, agent: AgentId) -> Sequence[str]:
        """Remove those that have ended; name them."""
        ...


class AgentsApi:
    """Agents as the nodes describe them at the moment of asking."""

    def __init__(
        self, fleet: Fleet, moves: MoveRegistry, erasures: Erasures, runs: QuotingRuns
    ) -> None:
        self._fleet = fleet
        self._moves = moves
        self._erasures = erasures
        self._runs = runs

    def routes(self) -> list[Route]:
        return [
            Route("/v1/agents", self.index, methods=["GET"]),
            Route("/v1/agents/{agent}", self.show, methods=["GET"]),
            Route("/v1/agents/{agent}", self.erase, methods=["DELETE"]),
            Route("/v1/agents/{agent}/migrate", self.migrate, methods=["POST"]),
            Route("/v1/agents/{agent}/pin", self.pin, methods=["POST"]),
        ]

    async def index(self, request: Request) -> Response:
        """List the tenant's agents, as far as the nodes have told theirs."""
        self._fleet.discovery.require_nodes()
        await self._fleet.membership.refresh(relist=True)
        tenant = tenant_of(request)
        directory = self._fleet.directory
        agents = [agent_row(self._fleet, (tenant, agent)) for agent in directory.agents(tenant)]
        unheard = list(self._fleet.membership.unreported())
        unmet = self._fleet.discovery.missing_count
        told = {"complete": not unheard and not unmet, "unheard": unheard, "unmet": unmet}
        return JSONResponse({"object": "list", "data": agents, **told})

    async def show(self, request: Request) -> Response:
        key = agent_key(request)
        await self._fleet.membership.refresh(relist=True)
        if not self._fleet.directory.holdings(key):
            raise self._fleet.discovery.unknown_agent(key[1])
        return JSONResponse(agent_row(self._fleet, key))

    async def erase(self, request: Request) -> Response:
        """Erase an agent and, with `runs=true`, the ended runs that quote it."""
        key = agent_key(request)
        has_runs = query_flag(request.query_params, "runs")
        erasure = await self._erasures.erase(*key)
        removed = await self._runs.forget_quoting(*key) if has_runs else ()
        return JSONResponse(erasure_row(erasure, await self._runs.quoting(*key), removed))

    async def pin(self, request: Request) -> Response:
        """Let an agent be evicted last, or, with `pinned` false, like any other."""
        key = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("pinned")
        fields.require("pinned")
        pinned = fields.flag("pinned")
        return JSONResponse(pin_row(await self._fleet.ask_owner(PinAgent(*key, pinned))))

    async def migrate(self, request: Request) -> Response:
        """Move an agent to the node named by `to`; answers when it is committed."""
        tenant, agent = agent_key(request)
        fields = Fields(await read_object(request))
        fields.allow_only("to")
        target = require_text(fields.require("to"), "to")
        return JSONResponse(migration_row(await self._moves.migrate(tenant, agent, target)))
